"""A real run on a problem set with a tool: episodes are played, trained on, evaluated, and resumed bit for bit."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from sprawl.board.ledger import Ledger
from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.board.verify import verify_board
from sprawl.rollout.trajectories import load_batch
from tests.integration.test_resume import ROOT, kill_tree

STEPS = 4
# The base model answers additions with three digits and knows no calculator. A 4 stands for a call here, so that some
# of its answers are calls ("014" asks for 01) and some are right ("110").
PARAMS = '{terms: 2, template: "{expression}=", call_open: "", call_close: "4", result_close: "=", error: "-"}'
SETTINGS = [
    f"steps={STEPS}",
    "problems.name=calculator",
    f"problems.params={PARAMS}",
    "rollout.prompts=6",
    "rollout.samples=4",
    "rollout.max_new_tokens=5",
    "rollout.continuation=true",
    "anchor.every=2",
    "anchor.lag=2",
    "checkpoint.every=2",
    "evaluate.every=2",
    "evaluate.problems=10",
]


def command(board: Path, run_id: str, resume: bool) -> list[str]:
    base = [sys.executable, "-m", "sprawl.cli", "run", "configs/tiny.yaml", "--runner", "plain", "--board", str(board)]
    if resume:
        return [*base, "--resume", run_id]
    return [*base, "--run-id", run_id, *(part for setting in SETTINGS for part in ("--set", setting))]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_episodes_train_evaluate_and_resume(tmp_path: Path) -> None:
    board = tmp_path / "board"
    subprocess.run(command(board, "calm", resume=False), cwd=ROOT, check=True, timeout=240)
    store = open_store(str(board))
    report = verify_board(store, "calm")
    assert report.ok, report.problems

    turns, tokens = 0, 0
    for step in range(1, STEPS + 1):
        batch = load_batch(store, "calm", step)
        assert batch.turns is not None
        turns = max(turns, int(batch.turns.max()))
        if batch.loss_mask is not None:
            tokens += int(batch.response_lengths.sum()) - batch.response_tokens
        assert len(batch.islands) == 6
        for row in range(batch.samples):
            spans = batch.spans_of(row)
            assert spans is not None
            assert sum(span.end - span.start for span in spans) == int(batch.sampled_lengths[row])
            assert {span.version for span in spans} == {max(0, step - 2)}  # deterministic: pinned
    assert turns > 1
    assert tokens > 0  # read, not trained on
    ledger = Ledger(store, "calm")
    assert [record.version for record in ledger.evaluations()] == [0, 2, 4]
    assert any(record.grad_norm > 0 for record in ledger.steps())
    (counted,) = [event.data for event in ledger.events() if event.kind == "client_report"]
    assert counted["groups"] > STEPS * 6 * 4  # a request a turn

    process = subprocess.Popen(command(board, "killed", resume=False), cwd=ROOT)
    deadline = time.monotonic() + 120
    while not store.exists("killed/manifests/00000002.json"):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kill_tree(process)
    subprocess.run(command(board, "killed", resume=True), cwd=ROOT, check=True, timeout=240)
    for step in range(1, STEPS + 1):
        calm, killed = (load_batch(store, name, step) for name in ("calm", "killed"))
        assert calm.tokens.tolist() == killed.tokens.tolist()
        assert calm.logprobs.tolist() == killed.logprobs.tolist()
    assert verify_board(store, "killed").ok
    manifests = [VersionReader(store, name).manifest(STEPS) for name in ("calm", "killed")]
    roots = [manifest.root_digest for manifest in manifests if manifest is not None]
    assert len(roots) == 2
    assert roots[0] == roots[1]
