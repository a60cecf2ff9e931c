"""The processes of a study: `sprawl run` for one cell, its output in a log and, thinned out, passed on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from sprawl.study.plan import Cell

GRACE_S = 60.0
"""How long a run may take to stop its own processes and say how to resume."""
STEPS_SHOWN = 10  # every n-th step line is passed on; the log has all
_STEP_LINE = re.compile(r"^\s*(\d+)/(\d+)\s")
_TAIL = 20


def run_command(cell: Cell, board: str, resume: bool) -> list[str]:
    """How to start a cell's run, or to go on with one that was stopped (its config is on the board)."""
    command = [sys.executable, "-m", "sprawl.cli", "run", cell.base, "--runner", "plain", "--no-page", "--board", board]
    if resume:
        return [*command, "--resume", cell.run_id]
    return [*command, "--run-id", cell.run_id, *(part for item in cell.overrides for part in ("--set", item))]


class Processes:
    """Starts runs and ends them all on `stop`. May be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopping = False

    @property
    def stopping(self) -> bool:
        return self._stopping

    def run(self, command: Sequence[str], log: Path, show: Callable[[str], None]) -> tuple[int, list[str]]:
        """Run a command to its end, all output appended to `log`, what a reader wants to see given to `show`.

        Returns the exit code and the last lines. After `stop` nothing starts: the code is then that of SIGTERM.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {"OMP_WAIT_POLICY": "passive"} | os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "150"}
        tail: deque[str] = deque(maxlen=_TAIL)
        with log.open("a", encoding="utf-8") as kept:
            with self._lock:
                if self._stopping:
                    return -signal.SIGTERM, []
                # A session of its own: Ctrl-C in the terminal is ours to pass on, once, and in order.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
                self._running.add(process)
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    kept.write(line)
                    kept.flush()
                    text = line.rstrip()
                    tail.append(text)
                    if _worth_showing(text):
                        show(text)
                return process.wait(), list(tail)
            finally:
                if process.stdout is not None:
                    process.stdout.close()
                with self._lock:
                    self._running.discard(process)

    def stop(self) -> None:
        """Ask every run to stop, as Ctrl-C would, and wait until they have; kill what does not. Idempotent."""
        with self._lock:
            self._stopping = True
            running = list(self._running)
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _worth_showing(line: str) -> bool:
    step = _STEP_LINE.match(line)
    if step is None:
        return bool(line.strip())
    return int(step[1]) % STEPS_SHOWN == 0 or step[1] == step[2]
