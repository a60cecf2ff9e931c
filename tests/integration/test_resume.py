"""A real run with real processes, killed and resumed: it ends with the same bits as the undisturbed one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sprawl.board.ledger import Ledger
from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.board.verify import verify_board
from sprawl.delta.state import tensor_digests
from sprawl.train.checkpoint import read_blob

ROOT = Path(__file__).parents[2]
STEPS = 12
SETTINGS = [
    f"steps={STEPS}",
    "anchor.every=4",
    "anchor.lag=4",
    "checkpoint.every=2",
    "publish.keyframe_every=5",
    "evaluate.every=6",
    "evaluate.problems=20",
    "rollout.prompts=4",
    "rollout.samples=4",
    "rollout.max_new_tokens=5",
]


# The drift controller, with limits that make it act from the first steps on: all that it does is replayed too.
ACTING = (
    "control.enabled=true",
    "control.speed=1e-5",
    "control.patience=1",
    "control.dense_every=3",
    "control.stop_after=0",
)
CODECS = {
    "prf": ("boundary.codec=prf", *ACTING),
    "quantized-prf": ("boundary.codec=quantized-prf", "boundary.dense_every=5", "probe.gradient_every=3"),
    "subspace": ("boundary.codec=subspace", "grpo.minibatches=2", "grpo.epochs=2", "grpo.refill_rounds=1"),
}


def command(board: Path, run_id: str, resume: bool, more: tuple[str, ...] = ()) -> list[str]:
    base = [sys.executable, "-m", "sprawl.cli", "run", "configs/tiny.yaml", "--runner", "plain", "--board", str(board)]
    if resume:
        return [*base, "--resume", run_id]
    return [*base, "--run-id", run_id, *(part for setting in (*SETTINGS, *more) for part in ("--set", setting))]


def root_digests(board: Path, run_id: str) -> list[str]:
    reader = VersionReader(open_store(str(board)), run_id)
    manifests = [reader.manifest(version) for version in range(STEPS + 1)]
    return [manifest.root_digest for manifest in manifests if manifest is not None]


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of the run and of every process it started."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=10)
    process.wait(10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("codec", CODECS)
def test_killed_run_ends_with_the_bits_of_the_undisturbed_one(tmp_path: Path, codec: str) -> None:
    """With all that a codec carries from step to step: running means in the checkpoint, bases on the board."""
    board, more = tmp_path / "board", CODECS[codec]
    subprocess.run(command(board, "calm", resume=False, more=more), cwd=ROOT, check=True, timeout=240)
    calm = root_digests(board, "calm")
    assert len(calm) == STEPS + 1

    store = open_store(str(board))
    for kill_after in (3, 8):
        process = subprocess.Popen(command(board, "killed", resume=kill_after > 3, more=more), cwd=ROOT)
        deadline = time.monotonic() + 120
        while not store.exists(f"killed/manifests/{kill_after:08d}.json"):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        kill_tree(process)
    subprocess.run(command(board, "killed", resume=True), cwd=ROOT, check=True, timeout=240)

    assert root_digests(board, "killed") == calm
    ledger = Ledger(store, "killed")
    assert [record.step for record in ledger.steps()] == list(range(1, STEPS + 1))
    assert [record.step for record in ledger.fires() if record.kind == "scheduled"] == [4, 8, 12]
    assert all(record.newest_step <= record.step - 4 for record in ledger.fires())
    assert [record.control for record in ledger.steps()] == [record.control for record in Ledger(store, "calm").steps()]
    acted = [record.control for record in ledger.steps() if record.control is not None and record.control.level]
    if "control.enabled=true" in more:
        assert [record.step for record in ledger.fires() if record.kind == "extra"] == [6, 10]
        assert [record.sign_fire for record in ledger.steps()] == [None] * 4 + [4, 4, 6, 6, 8, 8, 10, 10]
        assert {control.lr_scale for control in acted} >= {0.5, 0.25, 0.125}
        assert any(control.dense for control in acted)
    else:
        assert not acted
        assert not any(record.kind == "extra" for record in ledger.fires())
    assert [record.version for record in ledger.evaluations()] == [0, 6, 12]
    assert verify_board(store, "killed").problems == []
    assert sum(event.kind == "resume" for event in ledger.events()) == 2
    assert not [event.message for event in ledger.events() if event.kind == "violation"]
    ages = [(record.sign_age, record.sign_weights_age) for record in ledger.steps()]
    apart = 2 if "control.enabled=true" in more else 4  # between two fires
    assert ages == [*[(None, None)] * 4, *((age, age + 4) for _ in range(8 // apart) for age in range(1, apart + 1))]
    last = ledger.checkpoint(STEPS)
    assert last is not None
    assert [about.base for about in last.masters.values()] == [8]  # a delta, written after two resumes
    masters = [read_blob(store, Ledger(store, run), STEPS, "masters") for run in ("calm", "killed")]
    assert tensor_digests(masters[0]) == tensor_digests(masters[1])
    rewards = [[record.reward for record in Ledger(store, run).steps()] for run in ("calm", "killed")]
    assert rewards[0] == rewards[1]

    output = subprocess.run(
        [sys.executable, "-m", "sprawl.cli", "report", "killed", "--board", str(board), "--json"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=120,
    ).stdout
    summary = json.loads(output)
    assert summary["steps"] == STEPS
    assert summary["fires"] == 3
    assert summary["violations"] == []
    probes = [[record.gradient for record in Ledger(store, run).steps()] for run in ("calm", "killed")]
    assert probes[0] == probes[1]
    assert summary["versions_verified"] == summary["versions_published"] == STEPS + 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupt_stops_everything_and_says_how_to_resume(tmp_path: Path, number: signal.Signals) -> None:
    board = tmp_path / "board"
    process = subprocess.Popen(command(board, "stopped", resume=False), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    store_path = board / "stopped" / "manifests" / "00000002.json"
    deadline = time.monotonic() + 120
    while not store_path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2  # the islands, at least
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"sprawl run configs/tiny.yaml --resume stopped --board {board}" in output
    assert not [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_lost_island_and_anchor_are_replaced_and_no_step_is_lost(tmp_path: Path) -> None:
    """kill -9 of an island and of the anchor in the middle of a run: it goes on, with the same bits."""
    board = tmp_path / "board"
    process = subprocess.Popen(command(board, "hurt", resume=False), cwd=ROOT)
    deadline = time.monotonic() + 240
    killed: set[str] = set()
    while process.poll() is None:
        assert time.monotonic() < deadline
        for name, step in (("island-0", 3), ("anchor", 5)):
            if name not in killed and (board / "hurt" / "manifests" / f"{step:08d}.json").exists():
                for member in psutil.Process(process.pid).children(recursive=True):
                    if name in " ".join(member.cmdline()):
                        member.kill()
                        killed.add(name)
        time.sleep(0.05)
    assert process.returncode == 0
    assert killed == {"island-0", "anchor"}
    ledger = Ledger(open_store(str(board)), "hurt")
    assert [record.step for record in ledger.steps()] == list(range(1, STEPS + 1))
    assert [record.step for record in ledger.fires()] == [4, 8, 12]
    kinds = [event.kind for event in ledger.events()]
    assert "island_lost" in kinds
    assert "violation" not in kinds
