"""The local fleet with stand-in commands: start, crash, stop, no orphans."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from infra import local_fleet
from infra.local_fleet import LocalFleet
from infra.processes import ProcessId, spawn, tail
from sprawl.config import parse_config
from sprawl.run.fleet import Exit, FleetContext, open_fleet

CONFIG = parse_config({"name": "t", "steps": 1, "policy": {"base": "x"}, "threads": {"island": 3, "anchor": 2}}, "test")
WAIT = "import os, sys, time; print(os.environ['OMP_NUM_THREADS'], *sys.argv[1:], flush=True); time.sleep(60)"


def context(tmp_path: Path, *anchor: str) -> FleetContext:
    return FleetContext(str(tmp_path / "board"), "run-1", CONFIG, tmp_path / "logs", anchor or None)


def await_log(path: Path) -> str:
    deadline = time.monotonic() + 20
    while not (text := tail(path)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return text


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


def test_the_fleet_is_registered_as_local(tmp_path: Path) -> None:
    assert isinstance(open_fleet("local", context(tmp_path)), LocalFleet)
