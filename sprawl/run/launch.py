"""How the processes of a trainer find each other: started by torchrun, or by rank 0 on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from sprawl.errors import SprawlError
from sprawl.train.runtime.control import Driver, Follower

COLLECTIVE_S = 1800.0
"""How long a process waits for another one that is alive: a slow link, not a dead or a stopped one."""
STOP_S = 10.0
_CONTROL = "sprawl/control"
_LOCAL = "127.0.0.1"
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def launched_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank when torchrun (or whoever keeps its contract) started it together with others, else None."""
    if int(environment.get("WORLD_SIZE", "1")) > 1 and "RANK" in environment:
        return int(environment["RANK"])
    return None


def launched_processes(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes torchrun started; 1 without it."""
    return 1 if launched_rank(environment) is None else int(environment["WORLD_SIZE"])


@dataclass
class LocalRanks:
    """The processes that rank 0 started on its own machine."""

    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    logs: dict[int, Path] = field(default_factory=dict)

    def start(self, rank: int, world: int, port: int, log_dir: Path, threads: int) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.logs[rank] = log_dir / f"trainer-{rank}.log"
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": _LOCAL,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 hosts the store and is there already
            "GLOO_SOCKET_IFNAME": _LOOPBACK,
            "OMP_NUM_THREADS": str(threads),
        }
        with self.logs[rank].open("ab") as log:
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "sprawl.run.stage_server"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is rank 0's to handle
            )

    def explain(self, rank: int) -> str | None:
        """How a process ended; None while it runs, or when it was started elsewhere."""
        process = self.processes.get(rank)
        if process is None:
            return None
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"{how} (log: {self.logs[rank]})"

    def stop(self) -> None:
        """Wait for those that were asked to end; kill those that did not."""
        for process in self.processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()


def drive(world: int, stages: int, log_dir: Path, threads: int, liveness_s: float) -> tuple[Driver, LocalRanks]:
    """Rank 0: gather `world` processes into the default process group, starting them unless torchrun did.

    `liveness_s`: how long one of them may say nothing at all before it is lost.

    Raises SprawlError when they do not come.
    """
    ranks = LocalRanks()
    if launched_rank() is None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        host = _LOCAL
        store: dist.Store = dist.TCPStore(_LOCAL, 0, world, is_master=True, wait_for_workers=False)
        for rank in range(1, world):
            ranks.start(rank, world, store.port, log_dir, threads)  # type: ignore[attr-defined]
    else:
        host = os.environ["MASTER_ADDR"]
        store = next(dist.rendezvous("env://"))[0]

    def describe(rank: int) -> str:
        replica, stage = divmod(rank, stages)
        where = f"stage {stage} of {stages}" + (f", replica {replica}" if world > stages else "")
        return f"trainer process {rank} ({where})"

    driver = Driver(host, world, describe)
    driver.explain, driver.end_others = ranks.explain, ranks.kill
    try:
        store.set(_CONTROL, json.dumps(driver.address))
        driver.accept()
        driver.watch(liveness_s)
        _join(store, 0, world)
    except BaseException:
        driver.close()
        ranks.kill()
        raise
    return driver, ranks


def follow() -> Follower:
    """Any other rank: join the group and connect to rank 0."""
    store, rank, world = next(dist.rendezvous("env://"))
    try:
        follower = Follower(rank, json.loads(store.get(_CONTROL)))
    except OSError as error:
        raise SprawlError(f"trainer process {rank} cannot reach process 0: {error}") from None
    _join(store, rank, world)
    return follower


def _join(store: dist.Store, rank: int, world: int) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("sprawl/group", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
