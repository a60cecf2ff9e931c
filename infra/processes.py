"""Processes we started, named so that they can be ended later by another command without ever hitting a stranger.

A pid alone is not a name: the kernel reuses it. A process is identified by pid *and* start time, and every process
started here leads its own session, so that its group can be ended as a whole and a terminal's Ctrl-C never reaches it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class ProcessId:
    """A process that is still the same one: `started` is its start time in Unix seconds, as the kernel reports it."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The identity of a running process; None when it is already gone."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return None

    def as_dict(self) -> dict[str, Any]:
        return {"pid": self.pid, "started": self.started}

    @classmethod
    def from_dict(cls, data: Any) -> ProcessId | None:
        """None for anything that is not such a record (a damaged state file names no process)."""
        try:
            return cls(int(data["pid"]), float(data["started"]))
        except (TypeError, KeyError, ValueError):
            return None

    def process(self) -> psutil.Process | None:
        """A handle, or None when it ended, is a zombie, or its pid now belongs to another process."""
        try:
            process = psutil.Process(self.pid)
            # Start times are kept in clock ticks (10 ms); the boot time they are added to may be re-estimated.
            if abs(process.create_time() - self.started) > 1.0 or process.status() == psutil.STATUS_ZOMBIE:
                return None
            return process
        except psutil.NoSuchProcess:
            return None

    @property
    def alive(self) -> bool:
        return self.process() is not None


def spawn(
    argv: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process as leader of its own session, stdin closed, stdout and stderr appended to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(env), cwd=cwd, start_new_session=True
        )


def end_tree(leaders: Sequence[ProcessId], grace_s: float = 10.0) -> None:
    """End processes, their groups and all their descendants: SIGTERM, then SIGKILL for what is left after `grace_s`.

    Only the leaders' groups and direct children are asked: what those started (a flow run's islands) is theirs to stop
    in order. Descendants are remembered before the first signal: once a parent is gone they cannot be found through it.
    """
    victims: dict[int, psutil.Process] = {}
    for leader in leaders:
        process = leader.process()
        if process is None:
            continue
        victims[process.pid] = process
        asked = [process.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            victims.update((child.pid, child) for child in process.children(recursive=True))
            asked += [child.pid for child in process.children()]
        for pid in asked:
            _signal_group(pid, signal.SIGTERM)
    _, alive = psutil.wait_procs(list(victims.values()), timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5.0)


def flow_processes(prefect_home: Path) -> dict[str, ProcessId]:
    """Flow run id -> process, of the flow runs that a worker of this Prefect home started, whether or not that worker
    still lives. What a flow run starts (islands, an anchor) inherits its environment and is not listed."""
    found: dict[str, ProcessId] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            flow_run = environment.get("PREFECT__FLOW_RUN_ID")
            if flow_run is None or environment.get("PREFECT_HOME") != str(prefect_home):
                continue
            runs_flow = any(word.startswith("prefect.") for word in process.cmdline()[1:3])
            if runs_flow and (identity := ProcessId.of(process.pid)) is not None and identity.alive:
                found[flow_run] = identity
    return found


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log that say something; empty when there is none."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
