"""The nodes of a task as SkyPilot tells of them, and how torchrun is told."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from sprawl.errors import SprawlError

PORT = 8476
PROBE_PORT = 8477


@dataclass(frozen=True)
class Nodes:
    """`ips`: of all nodes, the head first; `rank`: which one this is."""

    ips: tuple[str, ...]
    rank: int

    @property
    def head(self) -> str:
        return self.ips[0]

    @property
    def ip(self) -> str:
        return self.ips[self.rank]


def read_nodes(environment: Mapping[str, str]) -> Nodes:
    """From SKYPILOT_NODE_IPS (one a line), SKYPILOT_NODE_RANK and SKYPILOT_NUM_NODES; without them a single node.
    Raises SprawlError when they contradict each other."""
    ips = tuple(environment.get("SKYPILOT_NODE_IPS", "").split()) or ("127.0.0.1",)
    try:
        rank = int(environment.get("SKYPILOT_NODE_RANK") or 0)
        count = int(environment.get("SKYPILOT_NUM_NODES") or len(ips))
    except ValueError as error:
        raise SprawlError(f"SKYPILOT_NODE_RANK or SKYPILOT_NUM_NODES is no number: {error}") from None
    if count != len(ips) or not 0 <= rank < count:
        raise SprawlError(f"SkyPilot names {len(ips)} addresses for {count} nodes and says that this is node {rank}")
    return Nodes(ips, rank)


def processes_per_node(processes: int, nodes: Nodes) -> int:
    """Raises SprawlError when the trainer's processes do not fill the nodes evenly."""
    count = len(nodes.ips)
    if processes % count:
        raise SprawlError(
            f"{processes} trainer processes cannot be spread over {count} nodes",
            "policy.runtime=multi with stages x replicas a multiple of num_nodes (SPRAWL_SET), or another num_nodes",
        )
    return processes // count


def torchrun_argv(nodes: Nodes, per_node: int, arguments: Sequence[str]) -> list[str]:
    """The command of this node; `arguments` follow `python -m`."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(len(nodes.ips)), "--node-rank", str(nodes.rank), "--nproc-per-node", str(per_node)),
        *("--master-addr", nodes.head, "--master-port", str(PORT), "-m", *arguments),
    ]


def probe_environment(nodes: Nodes) -> dict[str, str]:
    """What `sprawl.cluster.probe` needs on this node: one process a node."""
    return {
        "RANK": str(nodes.rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(nodes.ips)),
        "MASTER_ADDR": nodes.head,
        "MASTER_PORT": str(PROBE_PORT),
    }


def interface_of(ip: str) -> str | None:
    """The network device that has this address, for GLOO_SOCKET_IFNAME: a machine with many devices would otherwise
    choose one that the others cannot reach. None where no device has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            return name
    return None
