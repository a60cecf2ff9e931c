"""Processes with a network each, joined by links of a given bandwidth: network namespaces on a bridge, `tc tbf` at
every egress. Needs root and iproute2. Linux only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DEVICE = "eth0"
BURST = "64kb"  # what a link lets through at once: a segment of a send that the kernel did not cut
QUEUE = "8mb"  # before a link drops, so that TCP fills it


@dataclass(frozen=True)
class Namespace:
    """One end of a link: `argv` runs a program there."""

    name: str
    address: str

    def argv(self, program: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *program]


def missing() -> str | None:
    """Why there can be no links here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (iproute2)"
    return None


def sent_bytes(device: str = DEVICE) -> int:
    """What the kernel has sent over a device of this process's namespace, headers and acknowledgements included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.strip().partition(":")
        if name == device:
            return int(counts.split()[8])
    raise RuntimeError(f"no network device {device} here")


@contextmanager
def linked(count: int, mbit: float | None) -> Iterator[list[Namespace]]:
    """`count` namespaces that reach each other; each sends at most `mbit` Mbit/s (None: as fast as it goes).

    Everything is gone afterwards. Raises RuntimeError with what `ip` or `tc` said when a step fails.
    """
    mark = f"sp{os.getpid() % 100000}"
    hub = f"{mark}h"
    made: list[str] = []

    def run(*argv: str) -> None:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")

    try:
        run("ip", "netns", "add", hub)
        made.append(hub)
        run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge", "up")
        ends = []
        for number in range(count):
            end = Namespace(f"{mark}n{number}", f"10.99.0.{number + 1}")
            run("ip", "netns", "add", end.name)
            made.append(end.name)
            run(
                *("ip", "-n", hub, "link", "add", f"to{number}", "type", "veth"),
                *("peer", "name", DEVICE, "netns", end.name),
            )
            run("ip", "-n", hub, "link", "set", f"to{number}", "master", "bridge", "up")
            run("ip", "-n", end.name, "addr", "add", f"{end.address}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                run("ip", "-n", end.name, "link", "set", device, "up")
            if mbit is not None:
                shape = ("rate", f"{mbit:g}mbit", "burst", BURST, "limit", QUEUE)
                run("tc", "-n", end.name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *shape)
            ends.append(end)
        yield ends
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
