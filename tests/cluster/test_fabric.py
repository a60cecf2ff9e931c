"""The verdict about a fabric, from logs as NCCL and its plugins write them, and device folders as the kernel does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sprawl.cluster.fabric import Device, judge, read_devices, read_nccl_log, worst
from sprawl.cluster.probe import REFUSED, Probe, decide

SOCKET = """\
n1:71:80 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
n1:71:80 [0] NCCL INFO NET/IB : No device found.
n1:71:80 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
n1:71:80 [0] NCCL INFO Using network Socket
n1:71:80 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
n1:71:80 [0] NCCL INFO Channel 01/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""
EFA = """\
ip-10-0-0-1:68:69 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)
ip-10-0-0-1:68:69 [0] NCCL INFO Using network AWS Libfabric
ip-10-0-0-1:68:69 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/0/GDRDMA
"""
EFA_NEW = """\
ip-10-0-0-1:68:69 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)
ip-10-0-0-1:68:69 [0] NCCL INFO Using network Libfabric
"""
INFINIBAND = """\
h1:9:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [2]mlx5_4:1/RoCE [RO]; OOB eth0:10.1.0.2<0>
h1:9:9 [0] NCCL INFO Using network IB
h1:9:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
h1:9:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] via P2P/CUMEM
"""
GPUDIRECT = (
    "g:1:1 [0] NCCL INFO Using network FasTrak\ng:1:1 [0] NCCL INFO Channel 02/0 : 0[0] -> 1[0] via NET/FasTrak/3\n"
)


def devices(count: int, active: int | None = None, name: str = "mlx5_{}") -> list[Device]:
    return [Device(name.format(i), "InfiniBand", i < (count if active is None else active)) for i in range(count)]


@pytest.mark.parametrize(
    ("text", "networks", "channels", "provider", "nics"),
    [
        (SOCKET, ("Socket",), {"Socket": 2}, None, None),
        (EFA, ("AWS Libfabric",), {"AWS Libfabric": 1}, "efa", 16),
        (EFA_NEW, ("Libfabric",), {}, "efa", 32),
        (INFINIBAND, ("IB",), {"IB": 1}, None, 3),
        (GPUDIRECT, ("FasTrak",), {"FasTrak": 1}, None, None),
        ("nothing of interest\n", (), {}, None, None),
    ],
)
def test_what_a_log_says(text, networks, channels, provider, nics) -> None:
    log = read_nccl_log(text)
    assert (log.networks, dict(log.channels), log.provider, log.nics) == (networks, channels, provider, nics)


@pytest.mark.parametrize("text", [EFA, EFA_NEW, INFINIBAND, GPUDIRECT])
def test_fabrics_are_recognised(text: str) -> None:
    assert judge(read_nccl_log(text), devices(3), {}).transport == "fabric"


@pytest.mark.parametrize(
    ("found", "environment", "fix"),
    [
        ([], {}, "network_tier: best"),
        (devices(8), {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1 is set"),
        (devices(8), {"NCCL_NET": "Socket"}, "NCCL_NET=Socket is set"),
        (devices(8), {"FI_PROVIDER": "tcp"}, "FI_PROVIDER=tcp is set"),
        (devices(8, active=0), {}, "ports are down"),
        (devices(8, name="rdmap{}s0"), {}, "aws-ofi-nccl"),
        (devices(8), {}, "libibverbs"),
    ],
)
def test_tcp_is_found_and_explained(found, environment, fix) -> None:
    verdict = judge(read_nccl_log(SOCKET), found, environment)
    assert verdict.transport == "tcp"
    assert verdict.fix is not None
    assert fix in verdict.fix


def test_libfabric_over_plain_sockets_is_tcp() -> None:
    log = read_nccl_log(EFA.replace("Provider is efa (found 16 nics)", "Provider is tcp"))
    assert judge(log, devices(16), {}).transport == "tcp"


def test_one_interface_of_many_is_not_a_fabric() -> None:
    log = read_nccl_log(EFA.replace("16 nics", "1 nics"))
    verdict = judge(log, devices(32, name="rdmap{}"), {})
    assert verdict.transport == "partial"
    assert "only 1 of 32" in verdict.reason


def test_no_gpu_and_no_word_are_not_taken_for_a_fabric() -> None:
    assert judge(None, devices(8), {}).transport == "tcp"
    assert judge(read_nccl_log(""), devices(8), {}).transport == "unknown"


def test_the_worst_node_counts_and_only_a_fabric_goes_on_by_itself() -> None:
    good, bad = judge(read_nccl_log(EFA), [], {}), judge(read_nccl_log(SOCKET), [], {})
    assert worst([good, bad, good]) == bad
    assert decide("require", Probe(good, 48.5)) == (
        0,
        "fabric: NCCL uses AWS Libfabric (1 channels), provider efa, 16 devices; 48.5 GB/s a node, one GPU each",
    )
    code, line = decide("require", Probe(bad, 1.1))
    assert code == REFUSED == 4
    assert "Socket" in line
    assert "SPRAWL_FABRIC=allow-tcp" in line
    assert decide("allow-tcp", Probe(bad, 1.1))[0] == 0


def test_devices_are_read_as_the_kernel_shows_them(tmp_path: Path) -> None:
    for name, state, layer in (("mlx5_0", "4: ACTIVE", "InfiniBand"), ("rdmap16s27", "1: DOWN", "Unspecified")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "link_layer").write_text(layer + "\n")
    assert read_devices(tmp_path) == [
        Device("mlx5_0", "InfiniBand", True),
        Device("rdmap16s27", "Unspecified", False),
    ]
    assert read_devices(tmp_path / "nothing") == []


@pytest.mark.slow
def test_two_nodes_without_a_fabric_refuse_together() -> None:
    """The probe itself, as two processes. There is no NCCL here, so what is judged is that there is none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        argv = [sys.executable, "-m", "sprawl.cluster.probe", "--mode", "require"]
        nodes.append(subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True))
    answers = [node.communicate(timeout=240)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [REFUSED, REFUSED]
    for answer in answers:
        assert "over TCP" in answer.splitlines()[-1]
