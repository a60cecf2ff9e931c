"""The runner: what is started, resumed, reused, tried again and given up, with a stand-in for `sprawl run`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest

from sprawl.board.store import open_store
from sprawl.study import runner
from sprawl.study.plan import Cell, plan_cells
from sprawl.study.process import Processes, run_command
from sprawl.study.runner import train_cell, train_cells
from tests.report.plausible import make_event, put
from tests.study.support import ROOT, ledger, make_study

# Leaves the ledger that the run would leave, after `steps` steps, and ends with `code`.
_STAND_IN = """
import sys
from sprawl.board.store import open_store
from sprawl.study.plan import plan_cells
from tests.report.plausible import put
from tests.study.support import ledger, make_study
board, run_id, steps, code = sys.argv[1:]
cell = next(cell for cell in plan_cells(make_study()) if cell.run_id == run_id)
put(open_store(board, create=True), ledger(cell, int(steps) or None))
for step in range(1, 22):
    print(f"{step:5d}/21    0.4")
print("sprawl: out of luck")
sys.exit(int(code))
"""


@pytest.fixture
def study():
    return make_study()


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Replaces the command; the list collects (run id, resumed). `plan` says how each start ends: (steps, code)."""
    calls: list[tuple[str, bool]] = []
    endings: dict[str, list[tuple[int, int]]] = {}

    def command(cell: Cell, board: str, resume: bool) -> list[str]:
        calls.append((cell.run_id, resume))
        steps, code = endings.get(cell.run_id, []).pop(0) if endings.get(cell.run_id) else (0, 0)
        return [sys.executable, "-c", _STAND_IN, board, cell.run_id, str(steps), str(code)]

    monkeypatch.setattr(runner, "run_command", command)
    monkeypatch.setattr(runner, "log_path", lambda cell: tmp_path / "logs" / f"{cell.run_id}.log")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return calls, endings


def test_commands_start_and_resume(study):
    cell = plan_cells(study, only=["prf"])[0]
    start = run_command(cell, "b", resume=False)
    assert start[1:] == [
        *("-m", "sprawl.cli", "run", cell.base, "--runner", "plain", "--no-page", "--board", "b"),
        *("--run-id", "three-prf-s7", "--set", "steps=40", "--set", "seed=7", "--set", "anchor.enabled=false"),
    ]
    resume = run_command(cell, "b", resume=True)
    assert resume[-2:] == ["--resume", "three-prf-s7"]
    assert "--set" not in resume


def test_all_are_trained_once_and_reused_afterwards(study, started, tmp_path):
    calls, _ = started
    cells, notes = plan_cells(study, seeds=[7], only=["prf", "dense"]), []
    outcomes = train_cells(cells, str(tmp_path / "board"), study, 2, notes.append)
    assert [(entry.cell, entry.status) for entry in outcomes] == [(cell, "finished") for cell in cells]
    assert sorted(calls) == [("three-dense-s7", False), ("three-prf-s7", False)]
    shown = [note for note in notes if note.startswith("dense s7 |")]
    assert [line.split()[3] for line in shown[:3]] == ["10/21", "20/21", "21/21"], "every tenth step and the last"
    log = (tmp_path / "logs" / "three-dense-s7.log").read_text()
    assert "    7/21" in log

    again = train_cells(cells, str(tmp_path / "board"), study, 1, notes.append)
    assert {entry.status for entry in again} == {"reused"}
    assert len(calls) == 2


def test_one_that_crashes_is_resumed_once_and_the_others_go_on(study, started, tmp_path):
    calls, endings = started
    endings["three-prf-s7"] = [(12, 9), (0, 1)]
    endings["three-dense-s7"] = [(12, 9), (12, 9)]
    cells = plan_cells(study, seeds=[7], only=["prf", "dense"])
    notes: list[str] = []
    board = str(tmp_path / "board")
    prf, dense = train_cells(cells, board, study, 1, notes.append)
    assert (prf.status, dense.status) == ("finished", "failed")
    assert [resumed for run_id, resumed in calls if run_id == "three-prf-s7"] == [False, True]
    assert dense.data is not None
    assert dense.data.last_step == 12
    assert runner.failures([prf, dense]) == ["three-dense-s7: ended with code 9 (out of luck)"]
    assert sum("trying once more" in note for note in notes) == 2


def test_a_run_that_gave_itself_up_is_a_result(study, started, tmp_path):
    calls, _ = started
    cell = plan_cells(study, seeds=[7], only=["prf"])[0]
    board = str(tmp_path / "board")
    stopped = ledger(cell, steps=12)
    put(open_store(board, create=True), replace(stopped, events=(make_event("verdict", 12),)))
    assert train_cell(cell, board, study, Processes(), lambda _: None).status == "reused"
    assert calls == []


def test_finished_runs_are_thinned_out_where_the_study_says_so(started, tmp_path, monkeypatch):
    thinned = []
    monkeypatch.setattr(runner, "keep_ledger_only", lambda store, run_id: thinned.append(run_id))
    study = make_study(keep="ledger")
    train_cells(plan_cells(study, seeds=[7], only=["prf"]), str(tmp_path / "board"), study, 1, lambda _: None)
    assert thinned == ["three-prf-s7"]


def test_stopping_asks_every_run_and_starts_none(tmp_path):
    script = (
        "import signal, sys, time\n"
        "def stop(*_):\n print('stopped in order', flush=True)\n sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    processes, ready, ended = Processes(), threading.Event(), []
    thread = threading.Thread(
        target=lambda: ended.append(
            processes.run([sys.executable, "-c", script], tmp_path / "log", lambda line: ready.set())
        )
    )
    thread.start()
    assert ready.wait(60)
    began = time.monotonic()
    processes.stop()
    thread.join(60)
    assert ended == [(130, ["ready", "stopped in order"])]
    assert time.monotonic() - began < 30
    assert processes.run([sys.executable, "-c", "print(1)"], tmp_path / "log", print) == (-signal.SIGTERM, [])


def test_an_interrupt_stops_what_runs(study, monkeypatch, tmp_path):
    cells = plan_cells(study, seeds=[7], only=["prf", "dense"])
    monkeypatch.setattr(
        runner,
        "run_command",
        lambda *_, **__: [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"],
    )
    monkeypatch.setattr(runner, "log_path", lambda cell: tmp_path / f"{cell.run_id}.log")
    interrupted = threading.Event()

    def note(text: str) -> None:
        if not interrupted.is_set():
            interrupted.set()
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_cells(cells, str(tmp_path / "board"), study, 1, note)
    assert not (tmp_path / "three-dense-s7.log").exists(), "the second one never began"
