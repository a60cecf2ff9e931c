"""Which network collectives between nodes really take: read from NCCL's own log, the RDMA devices of the machine and
the environment, and judged. Pure functions; `sprawl.cluster.probe` runs the collective that makes the log.

A fabric that is missing is seldom an error to NCCL: without its plugin, or with a device that does not come up, it says
"Using network Socket" in a log that nobody reads and trains on, ten times slower.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Transport = Literal["fabric", "partial", "tcp", "unknown"]

INFINIBAND = Path("/sys/class/infiniband")

# Lines as NCCL (2.10 to 2.28) and the OFI plugin write them; capital letters vary between releases.
_CHANNEL = re.compile(r"\bvia NET/([A-Za-z][A-Za-z0-9_ ./-]*?)/\d")
_USING = re.compile(r"\bUsing network ([A-Za-z][A-Za-z0-9_ .-]*?)\s*$")
_PROVIDER = re.compile(
    r"NET/OFI Selected provider is ([a-z0-9_-]+)(?:;?[a-z0-9_-]*)?(?:, fabric is [^(]*)?\s*(?:\(found (\d+) nics\))?",
    re.IGNORECASE,
)
_IB_USING = re.compile(r"NET/IB ?: Using (.*)$")
_IB_DEVICE = re.compile(r"\[\d+\]\S+:\d+/(?:IB|RoCE|uverbs)")
# Providers of libfabric that are plain sockets underneath.
_SOCKET_PROVIDERS = frozenset({"tcp", "sockets", "udp", "net", "ofi_rxm", "ofi_rxd", "shm"})


@dataclass(frozen=True)
class NcclLog:
    """What an NCCL log says. `channels`: connections between nodes by network; `networks`: those that NCCL said it
    uses; `nics`: devices in use, None where the log does not say."""

    channels: Counter[str] = field(default_factory=Counter)
    networks: tuple[str, ...] = ()
    provider: str | None = None
    nics: int | None = None


@dataclass(frozen=True)
class Device:
    """A device under /sys/class/infiniband. `link_layer`: InfiniBand, Ethernet (RoCE), Unspecified (EFA) ..."""

    name: str
    link_layer: str
    active: bool


@dataclass(frozen=True)
class Verdict:
    """`transport`: fabric, partial (a fabric of which only some devices are used), tcp, or unknown; `reason` says what
    was seen, `fix` what to do about it."""

    transport: Transport
    reason: str
    fix: str | None = None


def read_nccl_log(text: str) -> NcclLog:
    """What the log of one or several processes says about networks. Lines it does not know are passed over."""
    channels: Counter[str] = Counter()
    networks: dict[str, None] = {}
    provider, nics = None, None
    for line in text.splitlines():
        if found := _CHANNEL.search(line):
            channels[found[1]] += 1
        elif found := _USING.search(line):
            networks[found[1]] = None
        elif found := _PROVIDER.search(line):
            provider = found[1].lower()
            nics = int(found[2]) if found[2] else nics
        elif found := _IB_USING.search(line):
            nics = len(_IB_DEVICE.findall(found[1])) or None
    return NcclLog(channels, tuple(networks), provider, nics)


def read_devices(root: Path = INFINIBAND) -> list[Device]:
    """RDMA devices of this machine by name; a device is active when one of its ports is. Empty where there are none."""
    devices = []
    for device in sorted(root.iterdir()) if root.is_dir() else []:
        ports = sorted((device / "ports").iterdir()) if (device / "ports").is_dir() else []
        states = [_read(port / "state") for port in ports]
        layers = [_read(port / "link_layer") for port in ports]
        devices.append(
            Device(
                device.name,
                next((layer for layer in layers if layer), "Unspecified"),
                any("ACTIVE" in state for state in states),
            )
        )
    return devices


def judge(log: NcclLog | None, devices: Iterable[Device], environment: Mapping[str, str]) -> Verdict:
    """Whether collectives between nodes run over a fabric. `log`: of a collective that really ran between nodes; None
    where none could, because there is no GPU for NCCL."""
    devices = list(devices)
    active = [device for device in devices if device.active]
    if log is None:
        return Verdict(
            "tcp",
            f"no GPU that NCCL could use: collectives are gloo's, over TCP ({_describe(devices)})",
            "take machines with GPUs, or accept it with SPRAWL_FABRIC=allow-tcp",
        )
    used = sorted(log.channels) or list(log.networks[-1:])
    if not used:
        return Verdict(
            "unknown",
            "NCCL's log names no network between nodes",
            "look at NCCL_DEBUG and NCCL_DEBUG_SUBSYS",
        )
    shown = ", ".join(f"{name} ({log.channels[name]} channels)" if log.channels[name] else name for name in used)
    if any(name.lower() == "socket" for name in used):
        return Verdict("tcp", f"NCCL uses {shown}: TCP ({_describe(devices)})", _fix(devices, environment))
    if "libfabric" in shown.lower() and log.provider in _SOCKET_PROVIDERS:
        reason = f"NCCL uses {shown} with libfabric's provider {log.provider}: TCP ({_describe(devices)})"
        return Verdict("tcp", reason, _fix(devices, environment))
    provider = f", provider {log.provider}" if log.provider else ""
    if log.nics is not None and log.nics * 2 <= len(active):
        return Verdict(
            "partial",
            f"NCCL uses {shown}{provider}, but only {log.nics} of {len(active)} active RDMA devices",
            "look for NCCL_IB_HCA, for interfaces that were not attached to the machine, and at the plugin's version",
        )
    nics = f", {log.nics} devices" if log.nics else ""
    return Verdict("fabric", f"NCCL uses {shown}{provider}{nics}")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Of several nodes: the one to act on."""
    order: tuple[Transport, ...] = ("tcp", "unknown", "partial", "fabric")
    return min(verdicts, key=lambda verdict: order.index(verdict.transport))


def _describe(devices: list[Device]) -> str:
    if not devices:
        return "the machine has no RDMA devices"
    active = sum(device.active for device in devices)
    layers = "/".join(sorted({device.link_layer for device in devices}))
    return f"the machine has {len(devices)} RDMA devices, {active} active, {layers}"


def _fix(devices: list[Device], environment: Mapping[str, str]) -> str:
    """What stands between these machines and their fabric, as far as can be told."""
    if environment.get("NCCL_IB_DISABLE") == "1":
        return "NCCL_IB_DISABLE=1 is set: unset it"
    if environment.get("NCCL_NET", "").lower() == "socket":
        return "NCCL_NET=Socket is set: unset it"
    if environment.get("FI_PROVIDER", "").lower() in _SOCKET_PROVIDERS:
        return f"FI_PROVIDER={environment['FI_PROVIDER']} is set: unset it, or set efa"
    if not devices:
        return "ask for machines with `network_tier: best`, on a cloud and an instance type that have it"
    if not any(device.active for device in devices):
        return "its ports are down: that is for the cloud, or the image's drivers, to mend"
    if any(device.name.startswith(("efa", "rdmap")) for device in devices):
        return "EFA is there but NCCL does not find its plugin: install aws-ofi-nccl, or take an image that has it"
    return "the devices are there: check libibverbs in the image, /dev/infiniband in the container, and ulimit -l"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
