"""The local stack: a Prefect server with its UI, the `local` work pool, the deployments and one worker.

Everything it keeps lies under one home directory (`.sprawl`): the server's database and profile in `prefect/`, logs in
`logs/`, and `stack.json`, which names the processes so that `down` ends exactly those. Starting is idempotent, and a
start that fails or is interrupted leaves nothing running.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

import httpx

from infra import board_server, leftovers, ports
from infra.island_processes import lasting_islands
from infra.processes import ProcessId, end_tree, flow_processes, spawn, tail
from infra.recovery import HEARTBEAT_S
from infra.stack_state import State
from sprawl.errors import SprawlError

DEFAULT_PORT = 4200

# Batching cuts the server's cost of a task run from 30 to 10 ms of CPU and keeps SQLite from lock errors.
SETTINGS = {
    # A server that restarts within half a minute loses nothing; one that is gone does not hold a finished run for long.
    "PREFECT_CLIENT_MAX_RETRIES": "4",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "100",
}
# Settings of somebody's other server must not leak into this one.
FOREIGN_SETTINGS = ("PREFECT_API_", "PREFECT_CLOUD_", "PREFECT_PROFILE", "PREFECT_SERVER_DATABASE_", "PREFECT_UI_")


@dataclass(frozen=True)
class StackInfo:
    """A stack that is up. `started`: this call started the server; `notes`: what the user should know about it.
    `board`: URL of the board server's bucket, and the file with its address and keys; None without one."""

    api_url: str
    ui_url: str
    pid: int
    started: bool
    notes: tuple[str, ...] = ()
    board: tuple[str, Path] | None = None


@dataclass(frozen=True)
class StackStatus:
    """`server`: up, starting (alive, not answering) or down; `worker`: up or down; `board`: the board server, None
    where none was asked for."""

    server: str
    worker: str
    board: str | None = None
    api_url: str | None = None
    ui_url: str | None = None
    pid: int | None = None


def healthy(api_url: str, timeout_s: float = 2.0) -> bool:
    """Whether a Prefect server answers there."""
    try:
        return httpx.get(f"{api_url}/health", timeout=timeout_s).status_code == 200
    except httpx.HTTPError:
        return False


def is_up() -> bool:
    """Whether the working directory's stack is up. Registered under `sprawl.stacks`: `sprawl run` asks it."""
    return Stack().status().server == "up"


class Stack:
    """The stack of one home directory (default: `.sprawl` of the working directory)."""

    def __init__(self, home: Path | str = ".sprawl") -> None:
        self.home = Path(home).absolute()
        self.logs = self.home / "logs"
        self._state_file = self.home / "stack.json"

    def environment(self, api_url: str) -> dict[str, str]:
        """Environment in which a process talks to this stack's server and to no other."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN_SETTINGS)}
        return env | {"PREFECT_HOME": str(self.home / "prefect"), "PREFECT_API_URL": api_url} | SETTINGS

    def up(self, port: int | None = None, wait_s: float = 120.0, *, board: bool = False) -> StackInfo:
        """Bring the stack up and return once it can run flows; what is up already is left as it is.

        A server that died comes back on its port, and flow runs and the worker that still live go on with it. Flow runs
        whose process is gone are marked as crashed, which starts them again. `board`: an object store for boards too.

        Raises SprawlError when a port is taken, when the server dies or does not answer within `wait_s` (the message
        carries the end of its log); what this call started is stopped then, and on Ctrl-C.
        """
        with self._lock():
            state = State.read(self._state_file)
            notes: tuple[str, ...] = ()
            if state and port is not None and port != state.port and (state.server.alive or self._flows()):
                raise SprawlError(f"the stack is already up on port {state.port}", "`sprawl down` first")
            started = not (state and state.server.alive and self._wait(state, min(wait_s, 30.0)))
            if started:
                if state:
                    end_tree([state.server])  # hung; its worker and its flow runs are not its children
                chosen, notes = self._choose_port(port, state)
                state = self._start(chosen, wait_s, state)
            assert state is not None
            return self._complete(state, started=started, notes=notes, board=board)

    def down(self) -> bool:
        """End what `up` started, the flow runs of its worker and the islands that those left; whether there was
        anything.

        Those flow runs end as cancelled: nothing starts them again at the next `up`.
        """
        if not self._state_file.exists():
            return False
        with self._lock():
            state = State.read(self._state_file)
            running: list[ProcessId] = []
            if state:
                flows = self._flows()
                if flows and state.server.alive:
                    self._cancel(state, flows)
                running = [item for item in (state.worker, state.server) if item and item.alive] + list(flows.values())
                running += lasting_islands(self.home / "prefect")
                # The server goes last: what ends in order still tells it so.
                end_tree([item for item in running if item != state.server])
                end_tree([item for item in running if item == state.server])
                if state.board and state.board.process.alive:
                    running.append(state.board.process)
                    end_tree([state.board.process], grace_s=20.0)
            leftovers.sweep(self.home / "prefect", (), older_than_s=0.0)
            self._state_file.unlink(missing_ok=True)
            return bool(running)

    def status(self) -> StackStatus:
        """What is up now. Starts and changes nothing."""
        state = State.read(self._state_file)
        if state is None:
            return StackStatus("down", "down")
        worker = "up" if state.worker and state.worker.alive else "down"
        board = None if state.board is None else "up" if state.board.process.alive else "down"
        if not state.server.alive:
            return StackStatus("down", worker, board)
        server = "up" if healthy(state.api_url) else "starting"
        return StackStatus(server, worker, board, state.api_url, state.ui_url, state.server.pid)

    def _flows(self) -> dict[str, ProcessId]:
        return flow_processes(self.home / "prefect")

    # -- start

    def _choose_port(self, asked: int | None, state: State | None) -> tuple[int, tuple[str, ...]]:
        """The server's port, and what to say about it. One that died comes back where it was, if it can."""
        if asked is None and state:
            needed = (state.worker and state.worker.alive) or self._flows()
            asked = state.port if needed or ports.is_free(state.port) else None
        if asked is None:
            if ports.is_free(DEFAULT_PORT):
                return DEFAULT_PORT, ()
            chosen, other = ports.next_free(DEFAULT_PORT + 1), ports.holder(DEFAULT_PORT) or "another process"
            return chosen, (f"port {DEFAULT_PORT} is taken by {other}: using {chosen}",)
        if not ports.is_free(asked):
            who = ports.holder(asked)
            by = f" by {who}" if who else ""
            raise SprawlError(f"port {asked} is taken{by}", f"choose another, e.g. --port {ports.next_free(asked + 1)}")
        return asked, ()

    def _start(self, port: int, wait_s: float, before: State | None) -> State:
        log = self.logs / "server.log"
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        server = spawn(command, log=log, env=self.environment(f"http://127.0.0.1:{port}/api"), cwd=self.home)
        identity = ProcessId.of(server.pid)
        if identity is None:
            raise SprawlError(f"the Prefect server ended at once: {tail(log)}", f"log: {log}")
        state = State(port, identity, before.worker if before else None, before.board if before else None)
        try:
            state.write(self._state_file)
            if not self._wait(state, wait_s, server):
                why = "did not answer in time" if server.poll() is None else f"ended with code {server.returncode}"
                raise SprawlError(f"the Prefect server {why}; the end of {log}:\n{tail(log)}")
        except BaseException:
            self._undo(state, before)
            raise
        return state

    def _complete(self, state: State, *, started: bool, notes: tuple[str, ...], board: bool) -> StackInfo:
        """Register deployments and start worker and board server where that is not done yet; then heal flow runs."""
        before = state
        try:
            if (board or state.board) and not (state.board and state.board.process.alive):
                fresh = state.board is None
                state = replace(state, board=board_server.start(self.home, state.board))
                state.write(self._state_file)
                if fresh and state.worker and state.worker.alive:  # it was started without the board's keys
                    if self._flows():
                        notes += ("flow runs find the board server after the next `sprawl down` and `sprawl up`",)
                    else:
                        end_tree([state.worker])
            with self._client_settings(state):
                lonely = state.worker is None or not state.worker.alive
                if started or lonely:
                    notes += self._register(state)
                if lonely:
                    state = replace(state, worker=self._start_worker(state))
                    state.write(self._state_file)
                notes += self._heal()
        except BaseException:
            if started:
                self._undo(state, before)
            raise
        place = None if state.board is None else (state.board.url, state.board.variables_file)
        return StackInfo(state.api_url, state.ui_url, state.server.pid, started, notes, place)

    def _undo(self, state: State, before: State | None) -> None:
        """End what a failed start has started. A worker that was there before it stays, and so does its record."""
        kept = before.worker if before and before.worker and before.worker.alive else None
        mine = [state.server, *([state.worker] if state.worker and state.worker != kept else [])]
        end_tree(mine)
        if kept or self._flows():
            return
        if state.board:
            end_tree([state.board.process])
        self._state_file.unlink(missing_ok=True)

    def _start_worker(self, state: State) -> ProcessId | None:
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "local", "--type", "process"]
        environment = self.environment(state.api_url) | (state.board.variables() if state.board else {})
        worker = spawn(
            [*command, "--name", "local", "--install-policy", "never"],
            log=self.logs / "worker.log",
            env=environment,
            cwd=self.home.parent,
        )
        return ProcessId.of(worker.pid)

    def _register(self, state: State) -> tuple[str, ...]:
        from infra.deployments import register

        return register(self.home.parent).notes

    def _heal(self) -> tuple[str, ...]:
        """Flow runs that died unseen. A server that is too busy to say is asked again at the next `up`."""
        from prefect.client.orchestration import get_client

        from infra.deployments import DEPLOYMENTS, LOCAL_POOL, POST_TRAIN, flow_of
        from infra.recovery import reconcile

        names = [f"{flow_of(item).name}/{item.name}" for item in DEPLOYMENTS if item.entrypoint == POST_TRAIN]
        alive = self._flows()
        leftovers.sweep(self.home / "prefect", alive)
        try:
            with get_client(sync_client=True) as client:
                resumable = [client.read_deployment_by_name(name).id for name in names]
                return tuple(reconcile(client, LOCAL_POOL, alive, resumable))
        except httpx.HTTPError as error:
            return (f"flow runs were not looked after ({error})",)

    def _cancel(self, state: State, flow_runs: Iterable[str]) -> None:
        """Best effort: a server that does not answer will find them crashed."""
        from prefect.client.orchestration import get_client
        from prefect.states import Cancelled

        message = "Stopped by `sprawl down`; to go on, run the deployment with resume=<run id>."
        with (
            contextlib.suppress(Exception),
            self._client_settings(state),
            get_client(httpx_settings={"timeout": 10.0}, sync_client=True) as client,
        ):
            for flow_run in flow_runs:
                client.set_flow_run_state(UUID(flow_run), Cancelled(message=message), force=True)

    @contextlib.contextmanager
    def _client_settings(self, state: State) -> Iterator[None]:
        from prefect.settings import PREFECT_API_KEY, PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: state.api_url}, restore_defaults={PREFECT_API_KEY}):
            yield

    def _wait(self, state: State, wait_s: float, server: subprocess.Popen[bytes] | None = None) -> bool:
        """Poll until the server answers; False when it ended or `wait_s` passed."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if healthy(state.api_url, timeout_s=10.0):  # a machine that is busy makes it slow, not dead
                return True
            if server.poll() is not None if server else not state.server.alive:
                return False
            time.sleep(0.2)
        return False

    # -- state

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One `up` or `down` at a time; a second one waits and then finds the work done."""
        self.logs.mkdir(parents=True, exist_ok=True)
        (self.home / "prefect").mkdir(exist_ok=True)
        with (self.home / "stack.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
