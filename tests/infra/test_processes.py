"""Ending processes that another command started: exactly those, with their descendants, never a stranger."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from infra.processes import ProcessId, end_tree, spawn, tail

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)",
]
# A parent whose child leads a session of its own, as an island of a flow run does.
FAMILY = [
    sys.executable,
    "-c",
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
    "print(child.pid, flush=True); time.sleep(60)",
]


def wait_for(log: Path) -> str:
    deadline = time.monotonic() + 20
    while not (text := tail(log)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return text


def test_a_reused_pid_is_not_the_process_we_started(tmp_path: Path) -> None:
    process = spawn(SLEEP, log=tmp_path / "log", env=os.environ)
    try:
        identity = ProcessId.of(process.pid)
        assert identity is not None
        assert identity.alive
        stranger = dataclasses.replace(identity, started=identity.started - 100)
        assert not stranger.alive
        end_tree([stranger])
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_end_tree_takes_descendants_in_other_sessions_along(tmp_path: Path) -> None:
    process = spawn(FAMILY, log=tmp_path / "log", env=os.environ)
    child = int(wait_for(tmp_path / "log"))
    identity = ProcessId.of(process.pid)
    assert identity is not None
    end_tree([identity], grace_s=5)
    process.wait()
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert not identity.alive


def test_what_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    process = spawn(STUBBORN, log=tmp_path / "log", env=os.environ)
    wait_for(tmp_path / "log")
    identity = ProcessId.of(process.pid)
    assert identity is not None
    began = time.monotonic()
    end_tree([identity], grace_s=0.3)
    process.wait()
    assert not identity.alive
    assert time.monotonic() - began < 5


def test_a_spawned_process_is_out_of_reach_of_the_terminals_signals(tmp_path: Path) -> None:
    process = spawn(SLEEP, log=tmp_path / "log", env=os.environ)
    try:
        assert os.getpgid(process.pid) == process.pid
        assert os.getsid(process.pid) != os.getsid(0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("data", [None, {}, {"pid": 1}, {"pid": "x", "started": 1}, [1, 2]])
def test_a_damaged_state_names_no_process(data: object) -> None:
    assert ProcessId.from_dict(data) is None


def test_an_ended_process_has_no_identity() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert ProcessId.of(process.pid) is None
