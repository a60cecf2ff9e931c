"""The local stack: a Prefect server with its UI, the `local` work pool, the deployments and one worker.

Everything it keeps lies under one home directory (`.sprawl`): the server's database and profile in `prefect/`, logs in
`logs/`, and `stack.json`, which names the processes so that `down` ends exactly those. Starting is idempotent, and a
start that fails or is interrupted leaves nothing running.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from infra import ports
from infra.processes import ProcessId, end_tree, spawn, tail
from sprawl.errors import SprawlError

DEFAULT_PORT = 4200
FORMAT = 1

# Batching cuts the server's cost of a task run from 30 to 10 ms of CPU and keeps SQLite from lock errors.
SETTINGS = {
    # A server that restarts within half a minute loses nothing; one that is gone does not hold a finished run for long.
    "PREFECT_CLIENT_MAX_RETRIES": "4",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
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
    """A stack that is up. `started`: this call started the server; `notes`: what the user should know about it."""

    api_url: str
    ui_url: str
    pid: int
    started: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StackStatus:
    """`server`: up, starting (alive, not answering) or down; `worker`: up or down."""

    server: str
    worker: str
    api_url: str | None = None
    ui_url: str | None = None
    pid: int | None = None


@dataclass(frozen=True)
class _State:
    """stack.json."""

    port: int
    server: ProcessId
    worker: ProcessId | None = None

    @property
    def ui_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def api_url(self) -> str:
        return f"{self.ui_url}/api"

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "port": self.port,
            "api_url": self.api_url,
            "server": self.server.as_dict(),
            "worker": self.worker.as_dict() if self.worker else None,
        }


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

    def up(self, port: int | None = None, wait_s: float = 120.0) -> StackInfo:
        """Bring the stack up and return once it can run flows; one that is up already is returned as it is.

        Raises SprawlError when the asked port is taken, when the server dies or does not answer within `wait_s`
        (the message carries the end of its log); nothing is left running then, nor on Ctrl-C.
        """
        with self._lock():
            state = self._read()
            if state and state.server.alive:
                if port is not None and port != state.port:
                    raise SprawlError(f"the stack is already up on port {state.port}", "`sprawl down` first")
                if self._wait(state, min(wait_s, 30.0)):
                    return self._complete(state, started=False)
            if state:  # a hung server, or the worker of one that died
                end_tree([item for item in (state.worker, state.server) if item])
            notes: tuple[str, ...] = ()
            chosen = self._choose_port(port)
            if port is None and chosen != DEFAULT_PORT:
                who = ports.holder(DEFAULT_PORT) or "another process"
                notes = (f"port {DEFAULT_PORT} is taken by {who}: using {chosen}",)
            return self._start(chosen, wait_s, notes)

    def down(self) -> bool:
        """End what `up` started; whether there was anything."""
        if not self._state_file.exists():
            return False
        with self._lock():
            state = self._read()
            running = [item for item in (state.worker, state.server) if item and item.alive] if state else []
            end_tree(running)
            self._state_file.unlink(missing_ok=True)
            return bool(running)

    def status(self) -> StackStatus:
        """What is up now. Starts and changes nothing."""
        state = self._read()
        if state is None or not state.server.alive:
            return StackStatus("down", "up" if state and state.worker and state.worker.alive else "down")
        worker = "up" if state.worker and state.worker.alive else "down"
        server = "up" if healthy(state.api_url) else "starting"
        return StackStatus(server, worker, state.api_url, state.ui_url, state.server.pid)

    # -- start

    def _choose_port(self, asked: int | None) -> int:
        if asked is None:
            return DEFAULT_PORT if ports.is_free(DEFAULT_PORT) else ports.next_free(DEFAULT_PORT + 1)
        if not ports.is_free(asked):
            who = ports.holder(asked)
            by = f" by {who}" if who else ""
            raise SprawlError(f"port {asked} is taken{by}", f"choose another, e.g. --port {ports.next_free(asked + 1)}")
        return asked

    def _start(self, port: int, wait_s: float, notes: tuple[str, ...]) -> StackInfo:
        log = self.logs / "server.log"
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        server = spawn(command, log=log, env=self.environment(f"http://127.0.0.1:{port}/api"), cwd=self.home)
        identity = ProcessId.of(server.pid)
        if identity is None:
            raise SprawlError(f"the Prefect server ended at once: {tail(log)}", f"log: {log}")
        state = _State(port, identity)
        try:
            self._write(state)
            if not self._wait(state, wait_s, server):
                why = "did not answer in time" if server.poll() is None else f"ended with code {server.returncode}"
                raise SprawlError(f"the Prefect server {why}; the end of {log}:\n{tail(log)}")
            return self._complete(state, started=True, notes=notes)
        except BaseException:
            current = self._read() or state
            end_tree([item for item in (current.worker, state.server) if item])
            self._state_file.unlink(missing_ok=True)
            raise

    def _complete(self, state: _State, *, started: bool, notes: tuple[str, ...] = ()) -> StackInfo:
        """Register deployments and start the worker where that is not done yet."""
        if started or state.worker is None or not state.worker.alive:
            self._register(state)
            command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "local", "--type", "process"]
            worker = spawn(
                [*command, "--name", "local", "--install-policy", "never"],
                log=self.logs / "worker.log",
                env=self.environment(state.api_url),
                cwd=self.home.parent,
            )
            self._write(_State(state.port, state.server, ProcessId.of(worker.pid)))
        return StackInfo(state.api_url, state.ui_url, state.server.pid, started, notes)

    def _register(self, state: _State) -> None:
        from prefect.settings import PREFECT_API_KEY, PREFECT_API_URL, temporary_settings

        from infra.deployments import register

        with temporary_settings({PREFECT_API_URL: state.api_url}, restore_defaults={PREFECT_API_KEY}):
            register(self.home.parent)

    def _wait(self, state: _State, wait_s: float, server: subprocess.Popen[bytes] | None = None) -> bool:
        """Poll until the server answers; False when it ended or `wait_s` passed."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if healthy(state.api_url):
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

    def _read(self) -> _State | None:
        try:
            data = json.loads(self._state_file.read_text())
            server = ProcessId.from_dict(data["server"])
            return _State(int(data["port"]), server, ProcessId.from_dict(data.get("worker"))) if server else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _write(self, state: _State) -> None:
        temporary = self._state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(state.as_dict(), indent=2))
        temporary.replace(self._state_file)
