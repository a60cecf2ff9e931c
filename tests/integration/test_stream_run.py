"""A real run on a stream of rollouts, killed with kill -9 and resumed: no step is lost, no group is trained twice."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from sprawl.board.ledger import Ledger
from sprawl.board.store import open_store
from sprawl.board.verify import verify_board
from sprawl.report.data import load_run
from sprawl.report.violations import run_checks
from sprawl.rollout.trajectories import load_batch
from tests.integration.test_resume import ROOT, kill_tree

STEPS, PROMPTS, KILLED_AT = 6, 3, 3
SETTINGS = [
    f"steps={STEPS}",
    f"rollout.prompts={PROMPTS}",
    "deterministic=false",
    "rollout.feed=stream",
    "rollout.follow=eager",
    "rollout.max_staleness=2",
    "rollout.islands=1",
    "rollout.samples=4",
    "rollout.max_new_tokens=5",
    "grpo.refill_rounds=1",
    "policy.stages=2",
    "boundary.codec=dense",
    "anchor.enabled=false",
    "checkpoint.every=2",
    "evaluate.every=6",
    "evaluate.problems=10",
]


def command(board: Path, resume: bool) -> list[str]:
    base = [sys.executable, "-m", "sprawl.cli", "run", "configs/tiny.yaml", "--runner", "plain", "--board", str(board)]
    if resume:
        return [*base, "--resume", "run"]
    return [*base, "--run-id", "run", *(part for setting in SETTINGS for part in ("--set", setting))]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_stream_goes_on_where_its_last_batch_left_it(tmp_path: Path) -> None:
    board = tmp_path / "board"
    store = open_store(str(board), create=True)
    process = subprocess.Popen(command(board, resume=False), cwd=ROOT)
    deadline = time.monotonic() + 400
    while not store.exists(f"run/manifests/{KILLED_AT:08d}.json"):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kill_tree(process)
    subprocess.run(command(board, resume=True), cwd=ROOT, check=True, timeout=400)

    ledger = Ledger(store, "run")
    steps = ledger.steps()
    assert [record.step for record in steps] == list(range(1, STEPS + 1))
    assert sum(event.kind == "resume" for event in ledger.events()) == 1
    assert verify_board(store, "run").problems == []
    # It is not bit-reproducible, but what it says about itself holds: the replay of committed steps included.
    checks = {check.name: check for check in run_checks(load_run(store, "run"))}
    assert [violation for check in checks.values() for violation in check.violations] == []
    assert checks["stream"].applies
    assert checks["staleness"].applies

    trained: list[int] = []
    drawn = 0
    for record in steps:
        batch = load_batch(store, "run", record.step)
        assert batch.feed is not None
        assert record.feed is not None
        assert list(batch.feed.prompts) == record.feed.prompts
        assert batch.feed.next_prompt >= drawn
        assert not set(trained) & set(batch.feed.under_way)
        drawn = batch.feed.next_prompt
        trained += record.feed.prompts
        assert len(batch.islands) == PROMPTS
        assert int(batch.oldest_versions.min()) >= record.step - 1 - 2
        assert record.staleness_max == record.step - 1 - int(batch.oldest_versions.min())
    assert len(trained) == len(set(trained)) == STEPS * PROMPTS
