"""A rollout island in a process of its own, whose steps from one version to the next are timed.

Started by benchmarks.sync_fleet with one JSON object on the command line. It is the library's island, unregistered,
with a reader that looks at the clock. Prints its URL as a line of JSON, then answers every line on standard input with
one: `marks` (what was timed so far), `reload` (its engine, paused, reads the whole checkpoint from disk again),
`restart` (an engine that is a server of its own begins anew on that checkpoint).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from sprawl.board.ledger import Ledger
from sprawl.board.local_copy import MARK, Mark
from sprawl.board.manifest import Manifest
from sprawl.board.reader import Prepared, Served, VersionReader
from sprawl.board.remote import RemoteStore
from sprawl.errors import SprawlError
from sprawl.policy.checkpoint import load_weights
from sprawl.rollout.engines import CHECKPOINT, work_directory
from sprawl.rollout.island import Island
from sprawl.rollout.listen import IslandSettings, bind
from sprawl.rollout.vllm.engine import VllmEngine

RELOAD_TIMEOUT_S = 600.0


@dataclass
class Marks:
    """One version on this island. Moments in Unix seconds, durations in seconds; `bytes` are those of blobs.

    `seen`: its manifest was here; `prepared`: fetched and decoded; `staged`: checked against the published digest, and
    written down where the checkpoint is on disk, the gate shut; `patched`: the host copy is at it and hashed again.
    """

    seen: float
    fetch_s: float = 0.0
    bytes: int = 0
    preparing: float = 0.0
    prepared: float = 0.0
    staged: float = 0.0
    patched: float = 0.0


class MeteredStore(RemoteStore):
    """Times the reading of blobs."""

    blob_s = 0.0
    blob_bytes = 0

    def get(self, key: str) -> bytes:
        started = time.monotonic()
        data = super().get(key)
        if "/blobs/" in key:
            self.blob_s += time.monotonic() - started
            self.blob_bytes += len(data)
        return data


class TimedReader(VersionReader):
    def __init__(self, store: MeteredStore, run_id: str) -> None:
        super().__init__(store, run_id)
        self.marks: dict[int, Marks] = {}
        self._meter = store

    def manifest(self, version: int) -> Manifest | None:
        found = super().manifest(version)
        if found is not None:
            self.marks.setdefault(version, Marks(time.time()))
        return found

    def prepare(self, served: Served, version: int) -> Prepared:
        began, seconds, count = time.time(), self._meter.blob_s, self._meter.blob_bytes
        prepared = super().prepare(served, version)
        marks = self.marks[version]
        marks.preparing, marks.prepared = began, time.time()
        marks.fetch_s, marks.bytes = self._meter.blob_s - seconds, self._meter.blob_bytes - count
        return prepared

    def commit(self, served: Served, prepared: Prepared) -> None:
        # Also called for the steps of a jump inside `prepare`: the last call for a version is the one that counts.
        began = time.time()
        super().commit(served, prepared)
        marks = self.marks[prepared.version]
        marks.staged, marks.patched = began, time.time()


@dataclass(frozen=True)
class Plan:
    """`cache`: keep the checkpoint on disk there."""

    board: str
    run_id: str
    engine: str
    engine_args: str = ""
    compute_dtype: str = "float32"
    cache: str | None = None


async def timed_reload(island: Island) -> float:
    """Let the engine read a whole checkpoint from disk, as one without deltas does. Seconds without a token."""
    service = island.service
    assert service is not None
    assert service.gate.version is not None
    engine = service.engine
    started = time.monotonic()
    await engine.pause()
    if isinstance(engine, VllmEngine):
        api = engine._supervisor.serving().api  # a way past the host copy that the engine does not offer
        await api.command("/collective_rpc", RELOAD_TIMEOUT_S, {"method": "reload_weights"})
    else:
        # The embedded engine takes its weights from memory, so reading the file is a part of it.
        state = await asyncio.to_thread(load_weights, island.work_dir / CHECKPOINT)
        await engine.swap(Served(service.gate.version, state, {}, ""), frozenset(state))
    await engine.resume()
    return time.monotonic() - started


async def timed_restart(island: Island) -> float:
    """Seconds without a token."""
    service = island.service
    assert service is not None
    mark = Mark.model_validate_json((island.work_dir / CHECKPOINT / MARK).read_bytes())
    started = time.monotonic()
    await service.engine.load(Served(mark.version, {}, {}, mark.root_digest))
    return time.monotonic() - started


async def obey(island: Island, reader: TimedReader) -> None:
    """Answer what is asked on standard input."""
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        service = island.service
        if service is None:
            raise SprawlError("the island was asked before it served")
        answer: dict[str, Any] = {}
        if line == "reload":
            answer["seconds"] = await timed_reload(island)
        elif line == "restart":
            answer["seconds"] = await timed_restart(island)
        else:
            answer["marks"] = {version: asdict(marks) for version, marks in reader.marks.items()}
            answer["pause_seconds"] = service.reconciler.pause_seconds
            answer["last_commit"] = service.engine.info().get("last_commit")
        print(json.dumps(answer), flush=True)


async def live(island: Island, reader: TimedReader) -> int:
    obeying = asyncio.ensure_future(obey(island, reader))
    try:
        return await island.run(os.getppid())
    finally:
        obeying.cancel()


def main(plan: Plan) -> int:
    settings = IslandSettings(
        board=plan.board,
        run_id=plan.run_id,
        registered=False,
        follow="eager",
        max_wait_s=900.0,
        threads=1,
        compute_dtype="bfloat16" if plan.compute_dtype == "bfloat16" else "float32",
        engine=plan.engine,
        engine_args=plan.engine_args,
        cache=plan.cache,
        exit_with_parent=True,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    listener = bind(settings)
    store = MeteredStore.open(plan.board)
    assert isinstance(store, MeteredStore)
    ledger = Ledger(store, plan.run_id)
    reader = TimedReader(store, plan.run_id)
    island = Island(settings, ledger, ledger.run(), reader, listener, logging.getLogger("island").info)
    print(json.dumps({"url": island.url}), flush=True)
    with work_directory(settings, plan.run_id) as directory:
        island.work_dir = directory
        return asyncio.run(live(island, reader))


if __name__ == "__main__":
    sys.exit(main(Plan(**json.loads(sys.argv[1]))))
