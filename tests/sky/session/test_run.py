"""A run on a real Slurm by the shipped task files: the trainer on two nodes through the Prefect worker type, two
islands as managed jobs. One island's machine is taken away; SkyPilot finds another, and it serves the current version.

Substituted: the clouds by Slurm, preemption by `scancel` (Slurm has no spot machines), RDMA by TCP on loopback
(`SPRAWL_FABRIC=allow-tcp`), GPUs by the embedded engine on CPUs. Only `resources` of the shipped files are replaced.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import httpx
import pytest

from flows.post_train import post_train
from infra.processes import tail
from infra.skypilot.fleet import SkyFleet, job_prefix
from infra.skypilot.jobs import SkyJobs
from sprawl.board.ledger import Ledger, is_live
from sprawl.board.records import IslandRecord
from sprawl.board.store import open_store
from sprawl.config import load_config
from sprawl.fleet.reap import reap
from sprawl.run.fleet import FleetContext
from tests.conftest import PATIENCE
from tests.sky.session import prefect_side
from tests.sky.session.conftest import ASK_S, LAUNCH_S, ROOT, Clock, Session, head
from tests.sky.session.shipped import on_slurm

RUN = "on-slurm"
TOKEN = "a-token-of-this-test"
ISLANDS = ("east", "west")
# The trainer has to outlast an island's recovery, which waits more than it computes: on two cores it takes 60 to 90
# steps.
STEPS = 120 if (os.cpu_count() or 1) <= 4 else 500
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 * PATIENCE)]
OVERRIDES = [
    f"steps={STEPS}",
    "policy.stages=2",
    "policy.runtime=multi",
    "anchor.enabled=false",
    "deterministic=false",
    "evaluate.problems=16",
    f"evaluate.every={STEPS}",
]


@pytest.mark.usefixtures("prefect_server")
def test_trainer_and_islands_on_slurm(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.chdir(ROOT)
    board = session.board("run")
    ledger = Ledger(open_store(str(board)), RUN)
    fleet, environment = open_fleet(session, board)
    worker_log = session.directory / "worker.log"
    client = environment | {"PREFECT_API_URL": prefect_side.api_url()}
    prefect_side.create_pool(client, ROOT)
    deployment = prefect_side.deploy(post_train, "flows.post_train.post_train", job_variables(session, board))
    parameters = {"board": str(board), "run_id": RUN, "overrides": OVERRIDES, "fleet": "none"}

    with prefect_side.worker(client, ROOT, worker_log):
        flow_run = prefect_side.start(deployment, parameters)
        for number, island in enumerate(ISLANDS):
            # Nodes of this Slurm share one network: a port each.
            environment["SPRAWL_PORT"] = str(18310 + number)
            fleet.start_island(island)
        try:
            place = clock.until("infrastructure id known", lambda: prefect_side.read(flow_run).infrastructure_pid)
            cluster, _, number = place.partition("/")
            assert cluster.startswith("prefect-")
            assert number
            clock.until("trainer's nodes allocated", lambda: slurm_job(session, cluster))
            clock.until("flow run RUNNING", lambda: prefect_side.read(flow_run).start_time)
            clock.until("both islands ready", lambda: ready(ledger, ISLANDS))
            clock.until("version 3 published", lambda: head(ledger) >= 3)
            lost, before = ISLANDS[0], ready(ledger, ISLANDS)[ISLANDS[0]]
            job = clock.until("SkyPilot sees it run", lambda: running_job(lost), every_s=ASK_S)
            number, taken_at = machine(session, job), time.time()
            assert number is not None
            session.slurm.cancel(number)
            clock.until("SkyPilot has asked for another machine", lambda: machine(session, job) not in (None, number))
            back = clock.until("the island is back", lambda: again(ledger, lost, before), 2 * LAUNCH_S)
            assert prefect_side.read(flow_run).end_time is None, "the trainer ended before its island was back"
            version = head(ledger)
            served = clock.until("it serves the current version", lambda: serves(back, version))
            assert served >= version > (before.applied or 0)
            clock.until("SkyPilot counts it as recovered", lambda: recovered(job, taken_at), every_s=ASK_S)
            final = prefect_side.wait_final(flow_run, 2 * LAUNCH_S)
        except AssertionError:
            print(f"--- worker\n{tail(worker_log, 60)}\n--- API server\n{tail(session.sky.log, 20)}")
            raise
        assert final.state is not None
        assert final.state.is_completed(), f"{final.state}\n{tail(worker_log, 40)}"
        assert head(ledger) == STEPS
        clock.until("the trainer's cluster is down", lambda: slurm_job(session, cluster) is None)
    fleet.settle_s = 10.0  # nobody starts islands here, so nothing can be under way for two minutes
    reaped = reap(ledger.store, RUN, fleet, drain_s=30.0 * PATIENCE, limit_s=LAUNCH_S)
    assert set(reaped.seen) == set(ISLANDS)
    clock.until("no machine is left", lambda: session.slurm.jobs() == {})


def open_fleet(session: Session, board: Path) -> tuple[SkyFleet, dict[str, str]]:
    """The fleet's SkyPilot adapter, and the environment that it takes its variables from."""
    island = on_slurm(ROOT / "sky" / "rollout-worker.yaml", session.directory / "island.yaml", session.resources)
    environment = dict(os.environ) | {
        "SPRAWL_SKY_ISLAND": str(island),
        "SPRAWL_TOKEN": TOKEN,
        "SPRAWL_PYTHON": sys.executable,
        "SPRAWL_ADVERTISE": "private",
        "SPRAWL_ENGINE": "torch",
    }
    config = load_config(ROOT / "configs" / "tiny.yaml", OVERRIDES)
    context = FleetContext(str(board), RUN, config, session.directory / "fleet")
    return SkyFleet(context, environment=environment), environment


def job_variables(session: Session, board: Path) -> dict[str, object]:
    """Of the trainer: the shipped file, other resources, and what its header says to set."""
    return {
        "task": "sky/trainer.yaml",
        "resources": session.resources,
        "envs": {
            "SPRAWL_BOARD": str(board),
            "SPRAWL_SET": " ".join(OVERRIDES),
            "SPRAWL_FABRIC": "allow-tcp",
            "SPRAWL_PYTHON": sys.executable,
        },
        "secrets": {"SPRAWL_TOKEN": None},
        "poll_s": 10,
    }


def ready(ledger: Ledger, names: tuple[str, ...]) -> dict[str, IslandRecord]:
    """The islands' records once all of them are ready and alive; else nothing."""
    found = {item.island_id: item for item in ledger.islands() if item.state == "ready" and is_live(item)}
    return found if set(names) <= set(found) else {}


def again(ledger: Ledger, name: str, before: IslandRecord) -> IslandRecord | None:
    """An island's record, once it is ready in a new life."""
    record = ready(ledger, (name,)).get(name)
    return record if record is not None and record.started_at > before.started_at else None


def serves(island: IslandRecord, version: int) -> int:
    """The version that an island generates with when it is asked for `version` or newer; 0 while it does not."""
    body = {"text": "12+34=", "sampling_params": {"max_new_tokens": 2}, "weight_version": {"min_version": version}}
    try:
        answer = httpx.post(
            f"{island.url}/generate", json=body, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60.0
        )
    except httpx.HTTPError:
        return 0
    if answer.status_code != 200:
        return 0
    return int(answer.json()["weight_version_start"])


def slurm_job(session: Session, cluster: str) -> str | None:
    """The Slurm job that holds a SkyPilot cluster's nodes; its name begins with the cluster's."""
    return next((number for name, number in session.slurm.jobs().items() if name.startswith(cluster)), None)


def running_job(island: str) -> int | None:
    """The managed job of an island, once SkyPilot says that it runs."""
    (job,) = (job for job in SkyJobs().list(job_prefix(RUN)) if job.name.endswith(f"-{island}"))
    return job.job_id if job.status == "RUNNING" else None


def machine(session: Session, job: int) -> str | None:
    """The Slurm job that holds a managed job's machine. Its name is shortened, then has the managed job's number and a
    hash of the user."""
    return next((number for name, number in session.slurm.jobs().items() if re.search(rf"-{job}-\w+$", name)), None)


def recovered(job: int, since: float) -> bool:
    """Whether SkyPilot says that the job came to run (again) after `since`, Unix seconds."""
    found = next(item for item in SkyJobs().list(job_prefix(RUN)) if item.job_id == job)
    return found.status == "RUNNING" and (found.since or 0.0) > since
