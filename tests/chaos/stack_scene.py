"""A real stack with a real run on it, and the means to kill its parts with -9."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from infra.processes import ProcessId, flow_processes
from infra.stack import Stack, StackInfo
from sprawl.board.ledger import Ledger
from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store

ROOT = Path(__file__).parents[2]
PARTS = ("flow", "worker", "server")
LIMIT_S = float(os.environ.get("SPRAWL_CHAOS_PATIENCE", "300"))  # for one thing to happen; more on a busy machine


def overrides(steps: int) -> list[str]:
    """A run that is small, and still has fires, checkpoints, keyframes and evaluations in it."""
    return [
        f"steps={steps}",
        "anchor.every=4",
        "anchor.lag=4",
        "checkpoint.every=2",
        "publish.keyframe_every=5",
        "evaluate.every=1000",
        "evaluate.problems=20",
        "rollout.islands=1",
        "rollout.prompts=4",
        "rollout.samples=4",
        "rollout.max_new_tokens=5",
    ]


class Scene:
    """The stack of one directory, which also holds the board. `log` is what happened, for people."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.stack = Stack(place / ".sprawl")
        self.board = place / "runs"
        self.log: list[str] = []
        self.killed = dict.fromkeys(PARTS, 0)
        for name in ("configs", "models"):
            (place / name).symlink_to(ROOT / name)
        # What the worker and its flow runs import is this checkout, wherever they start.
        os.environ["PYTHONPATH"] = str(ROOT)

    def up(self) -> StackInfo:
        """What `sprawl up --keep` does every few seconds."""
        info = self.stack.up(self._port(), wait_s=LIMIT_S)
        for note in (*info.notes, *(["the server had died: started again"] if info.started and self.log else [])):
            self.say(note)
        return info

    def say(self, what: str) -> None:
        self.log.append(f"{time.strftime('%X')} {what}")
        print(self.log[-1], flush=True)

    def _port(self) -> int | None:
        state = self._state()
        if state is not None:
            return None
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def _state(self) -> dict | None:
        try:
            return json.loads((self.stack.home / "stack.json").read_text())
        except OSError:
            return None

    def flows(self) -> dict[str, ProcessId]:
        return flow_processes(self.stack.home / "prefect")

    def kill(self, parts: tuple[str, ...]) -> int:
        """kill -9 of the processes of these parts, all at once; how many there were."""
        state = self._state() or {}
        victims: list[tuple[str, psutil.Process]] = []
        for part in parts:
            if part == "flow":
                found = [identity.process() for identity in self.flows().values()]
            else:
                identity = ProcessId.from_dict(state.get(part))
                found = [identity.process() if identity else None]
            victims += [(part, process) for process in found if process is not None]
        for part, process in victims:
            process.kill()
            self.killed[part] += 1
        psutil.wait_procs([process for _, process in victims], timeout=20)
        names = ", ".join(f"{part} {process.pid}" for part, process in victims)
        self.say(f"killed {names or 'nobody'}")
        return len(victims)

    def head(self, run_id: str) -> int:
        store = open_store(str(self.board), create=True)
        return VersionReader(store, run_id).head() or 0

    def ledger(self, run_id: str) -> Ledger:
        return Ledger(open_store(str(self.board)), run_id)

    def finished(self, run_id: str) -> bool:
        return any(event.kind == "finish" for event in self.ledger(run_id).events())

    def wait(self, what: Callable[[], bool], why: str, *, tending: bool = True) -> None:
        """Until it is so; meanwhile the stack is looked after."""
        deadline, tended = time.monotonic() + LIMIT_S, time.monotonic()
        while not what():
            assert time.monotonic() < deadline, f"{why}: not within {LIMIT_S:.0f} s\n" + "\n".join(self.log)
            time.sleep(0.1)
            if tending and time.monotonic() - tended > 5:
                self.up()
                tended = time.monotonic()

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The `prefect` command as a person in this directory would type it."""
        api_url = (self._state() or {}).get("api_url", "")
        return subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            cwd=self.place,
            env=self.stack.environment(api_url),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )


@contextmanager
def scene(place: Path) -> Iterator[Scene]:
    """A stack that is up; nothing of it is left in the end, however it ends."""
    before = os.environ.get("PYTHONPATH")
    made = Scene(place)
    try:
        made.up()
        yield made
    finally:
        made.stack.down()
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before
