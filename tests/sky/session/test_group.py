"""The job group of a whole run on a real Slurm: trainer, island and anchor start together, and SkyPilot ends all of
them when the trainer has ended.

Substituted as in test_run.py, Kubernetes by Slurm; and one island instead of two, because the nodes of this Slurm share
one network and both would listen on the same port.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import yaml

from sprawl.board.ledger import Ledger
from sprawl.board.store import open_store
from tests.conftest import PATIENCE
from tests.sky.session.conftest import ASK_S, ROOT, Clock, Session, head
from tests.sky.session.shipped import on_slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 * PATIENCE)]

RUN = "a-group"
STEPS, EVERY = 6, 3
OVERRIDES = (
    f"steps={STEPS} policy.stages=2 policy.runtime=multi deterministic=false rollout.prompts=4 rollout.samples=4 "
    f"checkpoint.every={EVERY} anchor.every={EVERY} anchor.lag={EVERY} evaluate.problems=16 evaluate.every={STEPS}"
)


def test_a_group_ends_with_its_trainer(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    from sky.utils import dag_utils

    import sky
    from sky import jobs

    clock = Clock()
    monkeypatch.chdir(ROOT)
    board = session.board("group")
    path = on_slurm(ROOT / "sky" / "jobgroup.yaml", session.directory / "group.yaml", session.resources)
    header, *tasks = yaml.safe_load_all(path.read_text())
    for task in tasks:
        if task["name"] == "islands":
            task["num_nodes"] = 1
    path.write_text(yaml.safe_dump_all([header, *tasks], sort_keys=False))
    envs = {
        "SPRAWL_BOARD": str(board),
        "SPRAWL_RUN_ID": RUN,
        "SPRAWL_SET": OVERRIDES,
        "SPRAWL_FABRIC": "allow-tcp",
        "SPRAWL_PYTHON": sys.executable,
        "SPRAWL_ENGINE": "torch",
        "SPRAWL_PORT": "18330",
    }
    dag = dag_utils.load_job_group_from_yaml(str(path), list(envs.items()), [("SPRAWL_TOKEN", "a-token-of-this-test")])
    before = session.slurm.jobs()
    (number,), _ = sky.get(jobs.launch(dag, name=RUN))

    def states() -> dict[str, str]:
        """SkyPilot's status of each task of the group."""
        records: list[Any] = sky.get(jobs.queue_v2(refresh=False, job_ids=[number]))[0]
        return {record.task_name: record.status.value for record in records}

    # SkyPilot is asked once the board or Slurm says that there is something to hear.
    ledger = Ledger(open_store(str(board)), RUN)
    clock.until("the trainer has taken a step", lambda: head(ledger) >= 1)
    running = {"RUNNING", "SUCCEEDED"}.issuperset
    clock.until("all tasks of the group run", lambda: running(states().values()), every_s=ASK_S)
    clock.until("the run is complete", lambda: any(event.kind == "finish" for event in ledger.events()))
    assert head(ledger) == STEPS
    clock.until("the trainer has ended", lambda: states()["trainer"] == "SUCCEEDED", every_s=ASK_S)
    assert ledger.fire(STEPS - EVERY) is not None, "the anchor of the group fired"
    clock.until("no machine is left", lambda: session.slurm.jobs() == before)
    over = {"RUNNING", "CANCELLING", "WINDING_DOWN"}.isdisjoint
    clock.until("the group has ended", lambda: over(states().values()), every_s=ASK_S)
    print(f"group: {states()}")
