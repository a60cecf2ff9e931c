"""The local fleet: islands and anchor as processes of this machine. Registered as fleet `local`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from infra.processes import ProcessId, end_tree, spawn
from sprawl.run.fleet import Exit, FleetContext

GRACE_S = 5.0


class LocalFleet:
    """Starts each process in its own session, so that Ctrl-C in a terminal reaches the trainer only, which then stops
    the fleet in order. `--exit-with-parent` ends them when the trainer is killed without a chance to do so.
    """

    def __init__(self, context: FleetContext) -> None:
        self._context = context
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start_island(self, island_id: str) -> None:
        """Start an island unless it runs. Its output goes to `<log_dir>/<island_id>.log`."""
        command = ("island", *self._place(), "--island-id", island_id, "--exit-with-parent")
        self._start(island_id, (sys.executable, "-m", "sprawl.cli", *command), self._context.config.threads.island)

    def start_anchor(self) -> None:
        """Start the anchor unless it runs. `FleetContext.anchor_argv` replaces `sprawl anchor`; it is called the same
        way, with --board, --run-id and --exit-with-parent."""
        command = self._context.anchor_argv or (sys.executable, "-m", "sprawl.cli", "anchor")
        self._start("anchor", (*command, *self._place(), "--exit-with-parent"), self._context.config.threads.anchor)

    def poll(self) -> list[Exit]:
        """Processes that ended unasked since the last call. An anchor that ends with 0 is done, not lost."""
        ended = [(name, code) for name, process in self._running.items() if (code := process.poll()) is not None]
        for name, _ in ended:
            del self._running[name]
        return [Exit(name, code, self._log(name)) for name, code in ended if (name, code) != ("anchor", 0)]

    def stop(self) -> None:
        """SIGTERM to everything still running, SIGKILL after five seconds."""
        running, self._running = self._running, {}
        leaders = [identity for process in running.values() if (identity := ProcessId.of(process.pid))]
        end_tree(leaders, GRACE_S)
        for process in running.values():
            process.wait()

    def _place(self) -> tuple[str, ...]:
        return ("--board", self._context.board, "--run-id", self._context.run_id)

    def _log(self, name: str) -> Path:
        return self._context.log_dir / f"{name}.log"

    def _start(self, name: str, argv: tuple[str, ...], threads: int) -> None:
        current = self._running.get(name)
        if current is not None and current.poll() is None:
            return
        # Spinning OpenMP threads of several processes on the same cores slow each other tenfold.
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        self._running[name] = spawn(argv, log=self._log(name), env=env)
