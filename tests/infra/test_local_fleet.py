"""The local fleet with stand-in commands: start, crash, stop, no orphans."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra import local_fleet
from infra.island_processes import island_processes, lasting_islands
from infra.local_fleet import LocalFleet
from infra.processes import ProcessId, end_tree, spawn, tail
from sprawl.board.ledger import Ledger
from sprawl.board.records import RunRecord
from sprawl.board.store import open_store
from sprawl.config import parse_config
from sprawl.errors import SprawlError
from sprawl.fleet.controller import Controller
from sprawl.fleet.reap import reap
from sprawl.fleet.settings import FleetSettings
from sprawl.run.fleet import Exit, FleetContext, open_fleet

CONFIG = parse_config({"name": "t", "steps": 1, "policy": {"base": "x"}, "threads": {"island": 3, "anchor": 2}}, "test")
WAIT = "import os, sys, time; print(os.environ['OMP_NUM_THREADS'], *sys.argv[1:], flush=True); time.sleep(60)"


def context(tmp_path: Path, *anchor: str) -> FleetContext:
    return FleetContext(str(tmp_path / "board"), "run-1", CONFIG, tmp_path / "logs", anchor or None)


def await_log(path: Path) -> str:
    """The log's end once it has a whole line."""
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return tail(path)


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, ...]]]:
    """Replaces what is spawned by a sleeping process; the fleet, its log files and signals are the real ones."""
    started: dict[str, list[tuple[str, ...]]] = {}

    def stand_in(argv, *, log, env):
        started.setdefault(log.stem, []).append(tuple(argv))
        return spawn((sys.executable, "-c", WAIT), log=log, env=env)

    monkeypatch.setattr(local_fleet, "spawn", stand_in)
    return started


def test_island_command_names_the_run_and_ends_with_the_trainer(tmp_path: Path, standins) -> None:
    fleet = LocalFleet(context(tmp_path))
    try:
        fleet.start_island("island-0")
        fleet.start_anchor()
        place = ("--board", str(tmp_path / "board"), "--run-id", "run-1")
        assert standins["island-0"] == [
            (sys.executable, "-m", "sprawl.cli", "island", *place, "--island-id", "island-0", "--exit-with-parent")
        ]
        assert standins["anchor"] == [(sys.executable, "-m", "sprawl.cli", "anchor", *place, "--exit-with-parent")]
        assert await_log(tmp_path / "logs" / "island-0.log") == "3"
        assert await_log(tmp_path / "logs" / "anchor.log") == "2"
    finally:
        fleet.stop()


def test_starting_an_island_that_runs_is_a_no_op(tmp_path: Path, standins) -> None:
    fleet = LocalFleet(context(tmp_path))
    try:
        fleet.start_island("island-0")
        fleet.start_island("island-0")
        assert len(standins["island-0"]) == 1
    finally:
        fleet.stop()


def test_a_given_anchor_command_is_called_like_sprawl_anchor(tmp_path: Path) -> None:
    fleet = LocalFleet(context(tmp_path, sys.executable, "-c", WAIT))
    try:
        fleet.start_anchor()
        words = await_log(tmp_path / "logs" / "anchor.log").split()
        assert words == ["2", "--board", str(tmp_path / "board"), "--run-id", "run-1", "--exit-with-parent"]
    finally:
        fleet.stop()


def test_a_crash_is_reported_once_and_the_process_can_be_started_again(tmp_path: Path, standins) -> None:
    fleet = LocalFleet(context(tmp_path))
    try:
        fleet.start_island("island-1")
        fleet._running["island-1"].kill()
        fleet._running["island-1"].wait()
        assert fleet.poll() == [Exit("island-1", -9, tmp_path / "logs" / "island-1.log")]
        assert fleet.poll() == []
        fleet.start_island("island-1")
        assert len(standins["island-1"]) == 2
    finally:
        fleet.stop()


@pytest.mark.parametrize(("code", "lost"), [(0, 0), (143, 1)])
def test_an_anchor_that_is_done_is_not_lost(tmp_path: Path, code: int, lost: int) -> None:
    fleet = LocalFleet(context(tmp_path, sys.executable, "-c", f"import sys; sys.exit({code})"))
    fleet.start_anchor()
    fleet._running["anchor"].wait(20)
    assert len(fleet.poll()) == lost
    fleet.stop()


def test_stop_leaves_nothing_and_is_idempotent(tmp_path: Path, standins) -> None:
    fleet = LocalFleet(context(tmp_path))
    fleet.start_island("island-0")
    fleet.start_island("island-1")
    identities = [ProcessId.of(process.pid) for process in fleet._running.values()]
    fleet.stop()
    fleet.stop()
    assert [identity.alive for identity in identities if identity] == [False, False]
    assert fleet.poll() == []


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def test_it_scales_up_drains_and_replaces(tmp_path: Path, standins) -> None:
    """Islands end by SIGTERM, which is asked for once; what was asked to end is not lost."""
    fleet = LocalFleet(context(tmp_path))
    try:
        for number in range(3):
            fleet.start_island(f"island-{number}")
        fleet.start_anchor()
        assert [machine.island_id for machine in fleet.machines()] == ["island-0", "island-1", "island-2"]
        assert all(machine.phase == "running" for machine in fleet.machines())
        process = fleet._running["island-1"]
        fleet.drain_island("island-1")
        fleet.drain_island("island-1")
        assert process.wait(20) == -signal.SIGTERM
        fleet._running["island-2"].kill()
        fleet._running["island-2"].wait()
        assert [machine.island_id for machine in fleet.machines()] == ["island-0"]
        assert [lost.name for lost in fleet.poll()] == ["island-2"]
        fleet.drain_island("island-9")
        fleet.cancel_island("island-9")
    finally:
        fleet.stop()


def test_one_that_does_not_drain_can_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stubborn(argv, *, log, env):
        return spawn((sys.executable, "-c", STUBBORN), log=log, env=env)

    monkeypatch.setattr(local_fleet, "spawn", stubborn)
    monkeypatch.setattr(local_fleet, "GRACE_S", 0.2)
    fleet = LocalFleet(context(tmp_path))
    fleet.start_island("island-0")
    await_log(tmp_path / "logs" / "island-0.log")
    fleet.drain_island("island-0")
    assert len(fleet.machines()) == 1
    fleet.cancel_island("island-0")
    assert fleet.machines() == []
    assert fleet.poll() == []


def test_the_same_policy_scales_processes(tmp_path: Path, standins) -> None:
    """The controller with the local adapter: real processes, heartbeats by hand."""
    board = open_store(str(tmp_path / "board"), create=True)
    ledger = Ledger(board, "run-1")
    ledger.create_run(
        RunRecord(
            run_id="run-1",
            created_at=time.time(),
            config=CONFIG.model_dump(mode="json"),
            base_digest="0",
            parameters=1,
            sprawl_version="0",
        )
    )
    fleet = LocalFleet(context(tmp_path))
    try:
        controller = Controller(board, "run-1", fleet, FleetSettings(start_islands=2))
        assert controller.look().started == ("island-0", "island-1")
        assert controller.look().started == ()
        fleet.cancel_island("island-0")
        assert controller.look().target == 2
        reap(board, "run-1", fleet)
        assert fleet.machines() == []
        assert not controller.look().open
    finally:
        fleet.stop()


@pytest.fixture
def lasting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetContext]:
    """Islands are sleeping processes with the command lines of real ones; none is left in the end."""
    monkeypatch.setattr(local_fleet, "spawn", with_its_words)
    made = replace(context(tmp_path), lasting=True)
    yield made
    end_tree([item.identity for item in island_processes() if item.has("--board", made.board)], grace_s=0.2)


def with_its_words(argv, *, log, env):
    return spawn((sys.executable, "-c", WAIT, *argv), log=log, env=env)


def test_lasting_islands_are_found_by_the_next_look(lasting: FleetContext) -> None:
    """One look starts them and is gone; the next one finds them, starts none twice, and can end them."""
    first = LocalFleet(lasting)
    first.start_island("island-0")
    first.start_island("island-1")
    words = first._running["island-0"].args
    assert list(words[-3:]) == ["--obey-fleet", "--exit-when-idle", "3600"]
    processes = first._running
    del first
    second = LocalFleet(lasting)
    assert [(item.island_id, item.phase) for item in second.machines()] == [
        ("island-0", "running"),
        ("island-1", "running"),
    ]
    second.start_island("island-0")
    assert second._running == {}
    second.drain_island("island-0")  # is said on the board
    assert processes["island-0"].poll() is None
    second.cancel_island("island-0")
    assert processes["island-0"].poll() is not None
    assert [item.island_id for item in second.machines()] == ["island-1"]
    assert LocalFleet(replace(lasting, run_id="run-2")).machines() == []
    assert LocalFleet(replace(lasting, run_id="run-1")).machines() != []


def test_a_fleet_keeps_away_from_the_islands_of_a_trainer(lasting: FleetContext) -> None:
    trainer = LocalFleet(replace(lasting, lasting=False))
    try:
        trainer.start_island("island-0")
        with pytest.raises(SprawlError, match=r"belong to its trainer: island-0 \(.*fleet=none"):
            LocalFleet(lasting)
    finally:
        trainer.stop()


def test_what_a_stack_leaves_are_the_lasting_islands_of_its_flow_runs(
    lasting: FleetContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    fleet = LocalFleet(lasting)
    fleet.start_island("island-0")
    monkeypatch.setenv("PREFECT_HOME", "/elsewhere")
    fleet.start_island("island-1")
    assert [item.pid for item in lasting_islands(tmp_path / "home")] == [fleet._running["island-0"].pid]


def test_nobodys_fleet_starts_nothing(tmp_path: Path) -> None:
    fleet = open_fleet("none", context(tmp_path))
    fleet.start_island("island-0")
    fleet.start_anchor()
    assert (fleet.machines(), fleet.poll()) == ([], [])
    assert fleet.start_s > 600
    fleet.stop()


def test_the_fleet_is_registered_as_local(tmp_path: Path) -> None:
    assert isinstance(open_fleet("local", context(tmp_path)), LocalFleet)
