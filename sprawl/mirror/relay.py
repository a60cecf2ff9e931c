"""What a mirror does, without HTTP: one fetch from the board an object, whoever asks and however many do.

Blobs are checked against the digest in their key and kept on disk. Manifests are kept in memory for a while. Whether a
version is there yet is asked of the board once every `poll_s` for all readers together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO, Generic, TypeVar

from blake3 import blake3

from sprawl.board.store import MissingKey, Store
from sprawl.errors import BoardError, IntegrityError
from sprawl.mirror.cache import DiskCache
from sprawl.mirror.objects import BlobKey, ManifestKey

T = TypeVar("T")
log = logging.getLogger(__name__)

KEEP_MANIFEST_S = 60.0  # after which the board is asked again: retention may have deleted it
KEEP_MANIFEST_BYTES = 64 << 20
REFUSE_AGAIN_S = 2.0  # a blob that could not be had is not asked for again before
MAX_WATCHED = 256  # versions that readers wait for, over all runs
MAX_REMEMBERED = 4096  # refusals and absences
FETCHES = 4  # blobs that are fetched at once; each is in memory while it is


class Unavailable(Exception):
    """The mirror cannot deliver this now, and the board should be asked instead."""


class StillFetching(Exception):
    """The object is on its way from the board; ask again."""


@dataclass
class Totals:
    """Since the start, for /metrics."""

    responses: dict[tuple[str, int], int] = field(default_factory=dict)  # (kind, status) -> count
    sent_bytes: int = 0
    board_requests: int = 0
    board_bytes: int = 0
    board_failures: int = 0
    waiting: int = 0  # readers held until a version appears

    def count(self, kind: str, status: int) -> None:
        self.responses[kind, status] = self.responses.get((kind, status), 0) + 1


class _Recent(Generic[T]):
    """A few values, each for a while."""

    def __init__(self, weigh: Callable[[T], int], limit: int) -> None:
        self._held: OrderedDict[str, tuple[float, T]] = OrderedDict()
        self._weigh, self._limit, self._weight = weigh, limit, 0

    def get(self, key: str) -> T | None:
        held = self._held.get(key)
        if held is None:
            return None
        if held[0] < time.monotonic():
            self.drop(key)
            return None
        return held[1]

    def put(self, key: str, value: T, seconds: float) -> None:
        self.drop(key)
        self._held[key] = (time.monotonic() + seconds, value)
        self._weight += self._weigh(value)
        while self._weight > self._limit and self._held:
            self.drop(next(iter(self._held)))

    def drop(self, key: str) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._weight -= self._weigh(held[1])


class Relay:
    """Belongs to one event loop; the board is read in threads."""

    def __init__(self, board: Store, cache: DiskCache, *, poll_s: float) -> None:
        self.totals = Totals()
        self.cache = cache
        self.board_error: str | None = None  # why the last request to the board failed, if it did
        self._board = board
        self._poll_s = poll_s
        self._slots = asyncio.Semaphore(FETCHES)
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._looking: dict[str, asyncio.Task[bytes | None]] = {}
        self._watching: dict[str, asyncio.Task[bytes | None]] = {}
        self._waiters: Counter[str] = Counter()
        self._manifests = _Recent[bytes](len, KEEP_MANIFEST_BYTES)
        self._absent = _Recent[bool](lambda _: 1, MAX_REMEMBERED)
        self._refused = _Recent[Exception](lambda _: 1, MAX_REMEMBERED)

    async def blob(self, key: BlobKey, wait_s: float, *, suspect: bool = False) -> tuple[BinaryIO, int] | None:
        """The blob's open file and size; None when the board does not have it.

        Raises StillFetching after `wait_s`, Unavailable when the board cannot be read, holds a damaged blob, or it does
        not fit. `suspect`: a reader got wrong bytes from here, so what is on disk is checked again.
        """
        for _ in range(2):
            held = await self._open(key.digest, suspect)
            if held is not None:
                return held
            refused = self._refused.get(key.key)
            if isinstance(refused, MissingKey):
                return None
            if refused is not None:
                raise Unavailable(str(refused))
            task = self._fetching.get(key.key)
            if task is None:
                task = asyncio.ensure_future(self._fetch(key))
                self._fetching[key.key] = task
                task.add_done_callback(lambda _: self._fetching.pop(key.key, None))
            done, _ = await asyncio.wait({task}, timeout=wait_s)  # a reader that leaves does not stop the fetch
            if not done:
                raise StillFetching(key.key)
            suspect = False
        raise Unavailable(f"{key.key} was evicted before it could be sent: the cache is too small")

    async def manifest(self, key: ManifestKey, wait_s: float) -> bytes | None:
        """The manifest; None when the board does not have it after `wait_s`. Raises Unavailable when the board cannot
        be read: absence is only claimed when it was seen."""
        held = self._manifests.get(key.key)
        if held is not None:
            return held
        if wait_s <= 0 or (key.key not in self._watching and len(self._watching) >= MAX_WATCHED):
            return None if self._absent.get(key.key) else await self._look(key.key)
        task = self._watching.get(key.key)
        if task is None or task.done():
            task = self._watching[key.key] = asyncio.ensure_future(self._watch(key.key))
            task.add_done_callback(lambda done: self._unwatch(key.key, done))
        self._waiters[key.key] += 1
        self.totals.waiting += 1
        try:
            done, _ = await asyncio.wait({task}, timeout=wait_s)
        finally:
            self.totals.waiting -= 1
            self._waiters[key.key] -= 1
            self._waiters += Counter()  # drops what reached zero
        return task.result() if done and not task.cancelled() else None

    async def close(self) -> None:
        """Stop asking the board."""
        tasks = [*self._watching.values(), *self._fetching.values(), *self._looking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _open(self, digest: str, suspect: bool) -> tuple[BinaryIO, int] | None:
        return await asyncio.to_thread(self.cache.open, digest, suspect=suspect) if digest in self.cache else None

    async def _fetch(self, key: BlobKey) -> None:
        """Bring a blob into the cache, or note why it cannot be had."""
        async with self._slots:
            try:
                data = await self._read(key.key)
                await asyncio.to_thread(self._keep, key, data)
            except (BoardError, IntegrityError, OSError, ValueError) as error:
                if not isinstance(error, MissingKey):
                    log.warning("%s cannot be relayed: %s", key.key, error)
                # What does not fit will not fit later: remembered for longer, so that it is not fetched over and over.
                self._refused.put(key.key, error, 3600.0 if isinstance(error, ValueError) else REFUSE_AGAIN_S)

    def _keep(self, key: BlobKey, data: bytes) -> None:
        found = blake3(data).hexdigest()
        if found != key.digest:
            raise IntegrityError(f"{key.key} is damaged on the board: its bytes have digest {found}")
        self.cache.put(key.digest, data)

    async def _read(self, key: str) -> bytes:
        """One request to the board, counted."""
        self.totals.board_requests += 1
        try:
            data = await asyncio.to_thread(self._board.get, key)
        except MissingKey:
            self.board_error = None
            raise
        except BoardError as error:
            self.totals.board_failures += 1
            self.board_error = str(error)
            raise
        self.board_error = None
        self.totals.board_bytes += len(data)
        return data

    async def _look(self, key: str) -> bytes | None:
        """Ask the board for a manifest, once for all who want to know at this moment."""
        task = self._looking.get(key)
        if task is None:
            task = self._looking[key] = asyncio.ensure_future(self._look_now(key))
            task.add_done_callback(lambda _: self._looking.pop(key, None))
        return await asyncio.shield(task)

    async def _look_now(self, key: str) -> bytes | None:
        refused = self._refused.get(key)
        if refused is not None:
            raise Unavailable(str(refused))
        try:
            data = await self._read(key)
        except MissingKey:
            self._absent.put(key, True, self._poll_s)
            return None
        except BoardError as error:
            self._refused.put(key, error, REFUSE_AGAIN_S)
            raise Unavailable(str(error)) from None
        self._absent.drop(key)
        self._manifests.put(key, data, KEEP_MANIFEST_S)
        return data

    async def _watch(self, key: str) -> bytes | None:
        """The manifest once it is there; None when nobody waits for it any more. Raises Unavailable."""
        while True:
            data = await self._look(key)
            if data is not None:
                return data
            await asyncio.sleep(self._poll_s)
            if not self._waiters[key]:
                return None

    def _unwatch(self, key: str, task: asyncio.Task[bytes | None]) -> None:
        if self._watching.get(key) is task:
            del self._watching[key]
        if not task.cancelled():
            task.exception()  # retrieved: there may be nobody left to raise it to
