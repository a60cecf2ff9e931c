"""Islands of benchmarks.sync as processes, and what passes between a commit and their answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.sync_board import Link, Published, Writer
from benchmarks.sync_island import Marks, Plan
from sprawl.errors import SprawlError

START_S = 900.0
VARIABLES = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "NUMBA_NUM_THREADS": "1"}
PROMPT = [5, 6, 7]
SEGMENTS = ("commit", "discover", "fetch", "decode", "check", "patch", "pause", "rest")


@dataclass(frozen=True)
class Step:
    """One version on one island; seconds. The segments follow each other and add up to `latency`: from the call that
    created the manifest to the answer of a request that waited for the version.

    commit: until the manifest was durable, or the island saw it; discover: until it did; check: checked against the
    published digest, and staged; patch: the host copy patched and hashed, nothing admitted; pause: the engine
    generated nothing; rest: between these, the canary where there is one, and the answer itself.
    """

    version: int
    whole: bool
    bytes: int
    latency: float
    commit: float
    discover: float
    fetch: float
    decode: float
    check: float
    patch: float
    pause: float
    rest: float


@dataclass(frozen=True)
class Round:
    """One version on all islands. `board_bytes`: what the board sent them, manifests and polls included."""

    published: Published
    steps: list[Step]
    board_bytes: int

    @property
    def to_all(self) -> float:
        """Seconds from the commit to the last island's answer."""
        return max(step.latency for step in self.steps)

    @property
    def from_seen(self) -> float:
        """The same from the moment at which each of them saw the version: without the chance of when they poll."""
        return max(step.latency - step.discover for step in self.steps)


class IslandProcess:
    """A running island and its pipe."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self._pause_seconds = 0.0
        self.url = str(self._read()["url"])

    def marks(self, version: int) -> tuple[Marks, float]:
        """What was timed of a version, and the engine's pause for it. Blocking."""
        said = self._ask("marks")
        pause = said["pause_seconds"] - self._pause_seconds
        self._pause_seconds = said["pause_seconds"]
        commit = said["last_commit"]
        if commit is not None and commit["version"] == version:
            if commit["restarted"]:
                raise SprawlError(f"the engine was restarted at version {version}; its log: {self._log}")
            pause = commit["pause_s"]  # without the canary, during which others are served
        return Marks(**said["marks"][str(version)]), pause

    def reload(self) -> float:
        """Seconds that the engine pauses to read the whole checkpoint. Blocking."""
        return float(self._ask("reload")["seconds"])

    def restart(self) -> float:
        """Seconds until an engine that is a server of its own serves again after it was ended. Blocking."""
        return float(self._ask("restart")["seconds"])

    def memory(self) -> int:
        """Bytes that the process and its children have for themselves."""
        here = psutil.Process(self._process.pid)
        return sum(process.memory_full_info().uss for process in (here, *here.children(recursive=True)))

    def check(self) -> None:
        """Raises SprawlError with the end of its log when it is gone."""
        if self._process.poll() is not None:
            raise SprawlError(f"an island ended with {self._process.returncode}: {self._log.read_text()[-1000:]}")

    def _ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self.check()
        said: dict[str, Any] = json.loads(line)
        return said


@dataclass
class Fleet:
    """Islands that serve version 0 of `writer`'s board, read over `link`."""

    writer: Writer
    link: Link
    islands: list[IslandProcess]
    client: httpx.AsyncClient

    async def round(self, *, whole: bool) -> Round:
        """Publish a version and wait until every island has answered with it."""
        await asyncio.to_thread(self.writer.step)
        version, before = self.writer.next, self.link.sent
        waiting = [asyncio.ensure_future(self.answer(island, version)) for island in self.islands]
        # Islands poll; the commit comes at any moment of that.
        await asyncio.sleep(0.1 + random.random())
        published = await asyncio.to_thread(self.writer.publish, whole=whole)
        answered = await asyncio.gather(*waiting)
        steps = []
        for island, at in zip(self.islands, answered, strict=True):
            marks, pause = await asyncio.to_thread(island.marks, version)
            steps.append(divide(published, marks, pause, at))
        return Round(published, steps, self.link.sent - before)

    async def answer(self, island: IslandProcess, version: int) -> float:
        """The moment at which a request for `version` or newer was answered. Raises SprawlError when the answer is of
        another version, or the island says that it serves another."""
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "weight_version": {"min_version": version},
        }
        deadline = time.monotonic() + START_S
        while True:
            response = await self.client.post(f"{island.url}/generate", json=body)
            at = time.time()
            if response.status_code == 200:
                break
            island.check()
            if time.monotonic() > deadline:
                raise SprawlError(f"no answer of version {version}: {response.text[:300]}")
            await asyncio.sleep(0.5)
        info = (await self.client.get(f"{island.url}/server_info")).json()
        if not response.json()["weight_version_start"] == info["applied_version"] == version:
            raise SprawlError(f"asked for version {version}, the island serves {info['applied_version']}")
        return at


def divide(published: Published, marks: Marks, pause: float, answered: float) -> Step:
    """The segments of one island's step."""
    latency = answered - published.began
    durable = min(published.done, marks.seen) - published.began
    segments = {
        "commit": durable,
        "discover": marks.seen - published.began - durable,
        "fetch": marks.fetch_s,
        "decode": marks.prepared - marks.preparing - marks.fetch_s,
        "check": marks.staged - marks.prepared,
        "patch": marks.patched - marks.staged,
        "pause": pause,
    }
    rest = latency - sum(segments.values())
    return Step(published.version, published.whole, marks.bytes, latency, rest=rest, **segments)


@contextlib.asynccontextmanager
async def fleet(
    writer: Writer, count: int, plan: Plan, python: str, folder: Path, variables: dict[str, str] | None = None
) -> AsyncIterator[Fleet]:
    """`count` islands run by the interpreter `python`; with `plan.cache` each keeps its checkpoint on disk below it.

    Raises SprawlError with the end of an island's log when one does not come up.
    """
    link = Link(writer.store.root)
    folder.mkdir(parents=True)
    started: list[subprocess.Popen[str]] = []
    async with link.serving() as url, httpx.AsyncClient(timeout=httpx.Timeout(START_S)) as client:
        try:
            for number in range(count):
                own = {"board": url, "cache": f"{plan.cache}/{number}" if plan.cache else None}
                argv = [python, "-m", "benchmarks.sync_island", json.dumps(asdict(plan) | own)]
                started.append(_spawn(argv, folder / f"island-{number}.log", variables or {}))
            logs = [folder / f"island-{number}.log" for number in range(count)]
            # Its first line comes once it has read the run from the board, which this loop serves.
            islands = await asyncio.gather(
                *(asyncio.to_thread(IslandProcess, process, log) for process, log in zip(started, logs, strict=True))
            )
            made = Fleet(writer, link, list(islands), client)
            await asyncio.gather(*(made.answer(island, 0) for island in islands))
            yield made
        finally:
            await asyncio.to_thread(_stop, started)


def _spawn(argv: Sequence[str], log: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    with log.open("wb") as out:
        return subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            env=os.environ | VARIABLES | variables,
        )


def _stop(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Nothing of theirs is kept. An engine that is a server of its own ends when its island does."""
    family = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += psutil.Process(process.pid).children(recursive=True)
        process.kill()
    for process in processes:
        process.communicate()
    psutil.wait_procs(family, timeout=30.0)
