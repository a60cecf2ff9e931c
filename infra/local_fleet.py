"""The local fleet: islands and anchor as processes of this machine. Registered as fleet `local`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from infra.island_processes import LASTING, island_processes
from infra.processes import ProcessId, end_tree, spawn
from sprawl.errors import SprawlError
from sprawl.fleet.port import Machine
from sprawl.run.fleet import Exit, FleetContext

ANCHOR = "anchor"

GRACE_S = 5.0
IDLE_S = 3600  # a lasting island whose run and whose fleet are both gone


class LocalFleet:
    """Starts each process in its own session, so that Ctrl-C in a terminal reaches the trainer only, which then stops
    the fleet in order. `--exit-with-parent` ends them when the trainer is killed without a chance to do so.

    With `FleetContext.lasting` islands go on when whoever started them ends: the flow `fleet` looks once and is gone.
    They follow the fleet's log instead (`--obey-fleet`), and are found again by their command lines. Opening such a
    fleet raises SprawlError where the run's trainer has islands of its own here: their names would be the same.
    """

    start_s = 180.0
    settle_s = 0.0

    def __init__(self, context: FleetContext) -> None:
        self._context = context
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._asked: set[str] = set()  # to end
        if context.lasting and (of_trainer := self._found(lasting=False)):
            names = ", ".join(sorted(of_trainer))
            raise SprawlError(
                f"islands of run {context.run_id} on this machine belong to its trainer: {names}",
                "start a run whose islands a fleet looks after with fleet=none",
            )

    def start_island(self, island_id: str) -> None:
        """Start an island unless it runs. Its output goes to `<log_dir>/<island_id>.log`."""
        if self._context.lasting and island_id in self._found():
            return
        lasting = (LASTING, "--exit-when-idle", str(IDLE_S))
        ending = lasting if self._context.lasting else ("--exit-with-parent",)
        command = ("island", *self._place(), "--island-id", island_id, *ending)
        self._start(island_id, (sys.executable, "-m", "sprawl.cli", *command), self._context.config.threads.island)

    def start_anchor(self) -> None:
        """Start the anchor unless it runs. `FleetContext.anchor_argv` replaces `sprawl anchor`; it is called the same
        way, with --board, --run-id and --exit-with-parent."""
        command = self._context.anchor_argv or (sys.executable, "-m", "sprawl.cli", "anchor")
        self._start(ANCHOR, (*command, *self._place(), "--exit-with-parent"), self._context.config.threads.anchor)

    def poll(self) -> list[Exit]:
        """Processes that ended unasked since the last call. An anchor that ends with 0 is done, not lost."""
        ended = [(name, code) for name, process in self._running.items() if (code := process.poll()) is not None]
        lost = [(name, code) for name, code in ended if name not in self._asked and (name, code) != (ANCHOR, 0)]
        for name, _ in ended:
            del self._running[name]
            self._asked.discard(name)
        return [Exit(name, code, self._log(name)) for name, code in lost]

    def drain_island(self, island_id: str) -> None:
        """SIGTERM, once: a second one would cut its draining short."""
        process = self._running.get(island_id)
        if process is None:
            return  # another process started it: it reads on the fleet's log that it is to drain, if it follows that
        if process.poll() is None and island_id not in self._asked:
            self._asked.add(island_id)
            process.send_signal(signal.SIGTERM)

    def cancel_island(self, island_id: str) -> None:
        """End the process and what it started, after a moment if it does not go by itself."""
        process = self._running.get(island_id)
        if process is None:
            if left := self._found().get(island_id):
                end_tree([left], GRACE_S)
            return
        self._asked.add(island_id)
        if identity := ProcessId.of(process.pid):
            end_tree([identity], GRACE_S)
        process.wait()

    def machines(self) -> list[Machine]:
        """Processes of islands that run: this fleet's, and lasting ones that an earlier look has left."""
        mine = {
            name: identity
            for name, process in self._running.items()
            if name != ANCHOR and process.poll() is None and (identity := ProcessId.of(process.pid)) is not None
        }
        return [
            Machine(name, "running", identity.started, where=f"pid {identity.pid}")
            for name, identity in sorted({**self._found(), **mine}.items())
        ]

    def stop(self) -> None:
        """SIGTERM to everything still running, SIGKILL after five seconds."""
        running, self._running = self._running, {}
        self._asked.clear()
        leaders = [identity for process in running.values() if (identity := ProcessId.of(process.pid))]
        end_tree(leaders, GRACE_S)
        for process in running.values():
            process.wait()

    def _found(self, *, lasting: bool = True) -> dict[str, ProcessId]:
        """This run's islands on this machine, whoever started them: those that outlive their starter, or the others."""
        place = self._place()
        return {item.name: item.identity for item in island_processes() if item.has(*place) and item.lasting == lasting}

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
