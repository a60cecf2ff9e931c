"""A collective between all nodes, and the verdict about the network it took.

    python -m sprawl.cluster.probe --mode require       one process a node, with RANK, WORLD_SIZE, MASTER_ADDR and
                                                        MASTER_PORT as torchrun sets them

Exit codes: 0 go on; 4 refused, the last line says why (all nodes refuse together).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import click
import torch
import torch.distributed as dist

from sprawl.cluster.fabric import Verdict, judge, read_devices, read_nccl_log, worst

REFUSED = 4
PATIENCE_S = 300.0
PAYLOAD = 64 * 2**20  # bytes of an all-reduce
ROUNDS = 10


@dataclass(frozen=True)
class Probe:
    """`bus_gb_s`: bytes that each node sent, 1e9 a second; None where NCCL could not run."""

    verdict: Verdict
    bus_gb_s: float | None


def probe() -> Probe:
    """Run on every node at once; every one returns the verdict of the worst node and its own bandwidth."""
    store = next(dist.rendezvous("env://", timeout=timedelta(seconds=PATIENCE_S)))[0]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log, rate = (None, None)
    # Together or not at all: a node without a GPU would leave the others waiting.
    store.set(f"gpu/{rank}", str(int(torch.cuda.is_available() and dist.is_nccl_available())))
    if all(store.get(f"gpu/{other}") == b"1" for other in range(world)):
        log, rate = _collective(store, rank, world)
    verdict = judge(read_nccl_log(log) if log is not None else None, read_devices(), os.environ)
    store.set(f"verdict/{rank}", json.dumps(asdict(verdict)))
    verdicts = [Verdict(**json.loads(store.get(f"verdict/{other}"))) for other in range(world)]
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world:  # the store lives in this process
        time.sleep(0.05)
    return Probe(worst(verdicts), rate)


def _collective(store: dist.Store, rank: int, world: int) -> tuple[str, float]:
    """NCCL's log of an all-reduce over all nodes, and its bandwidth."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nccl.log"
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": str(path)}
        torch.cuda.set_device(0)
        dist.init_process_group(
            "nccl",
            store=dist.PrefixStore("probe", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=PATIENCE_S),
        )
        payload = torch.ones(PAYLOAD // 4, device="cuda")
        dist.all_reduce(payload)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(ROUNDS):
            dist.all_reduce(payload)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / ROUNDS
        dist.destroy_process_group()
        return path.read_text(errors="replace"), 2 * (world - 1) / world * PAYLOAD / seconds / 1e9


def decide(mode: str, found: Probe) -> tuple[int, str]:
    """Exit code and the line to print. `mode`: require or allow-tcp."""
    verdict = found.verdict
    rate = f"; {found.bus_gb_s:.1f} GB/s a node, one GPU each" if found.bus_gb_s is not None else ""
    line = f"fabric: {verdict.reason}{rate}"
    if verdict.transport == "fabric":
        return 0, line
    fix = f" ({verdict.fix})" if verdict.fix else ""
    if mode == "allow-tcp":
        return 0, f"{line}{fix}; going on, as SPRAWL_FABRIC=allow-tcp says"
    return REFUSED, f"{line}{fix}. Refused: SPRAWL_FABRIC=allow-tcp goes on all the same"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--mode", type=click.Choice(["require", "allow-tcp"]), default="require", show_default=True)
def main(mode: str) -> None:
    """Check the network between the nodes of a trainer."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        click.echo("fabric: one node, nothing crosses one")
        return
    code, line = decide(mode, probe())
    click.echo(line, err=code != 0)
    sys.exit(code)


if __name__ == "__main__":
    main()
