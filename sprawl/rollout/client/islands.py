"""The islands a client knows: who is there, who is well, who has how much to do, and which one to ask next."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
from pydantic import ValidationError

from sprawl.board.records import IslandRecord
from sprawl.errors import SprawlError
from sprawl.rollout.client.discovery import Seen
from sprawl.rollout.client.metrics import ClientMetrics

log = logging.getLogger(__name__)

REFRESH_S = 1.0  # age of the island list after which it is read again
FIRST_COOLDOWN_S = 0.25
MAX_COOLDOWN_S = 4.0
LOST_AFTER_INTERVALS = 3
LOAD_KEPT_S = 5.0  # age after which a reported load says nothing any more
PROBES = 32  # islands asked for their load at once
PROBE_S = 1.0

Life = tuple[str, float]
"""One life of an island: a restarted one may serve again what the old one was past."""


@dataclass
class Island:
    """One island as this client sees it. `window`: groups it may have from us at once; it shrinks when the island
    says that it has too much to do, and grows back with every answer."""

    record: IslandRecord
    window: float
    load: int = 0  # groups of ours that it works on
    failures: int = 0  # in a row
    rested_at: float = 0.0  # monotonic time from which it is asked again
    last_error: str = ""
    alive: bool = True
    others: int = 0  # requests of others that it works on, at the last look
    looked_at: float = float("-inf")
    order: float = field(default_factory=random.random)  # so that many clients do not all begin with the same one

    @property
    def life(self) -> Life:
        return self.record.island_id, self.record.started_at

    @property
    def ready(self) -> bool:
        return self.alive and self.record.state == "ready"

    def open_at(self, now: float) -> bool:
        return self.load < max(1, int(self.window)) and self.rested_at <= now

    def work_at(self, now: float) -> int:
        """Requests that it works on, ours and, as far as known, those of others."""
        return self.load + (self.others if now - self.looked_at <= LOAD_KEPT_S else 0)

    def line(self) -> str:
        applied = "no version" if self.record.applied is None else f"version {self.record.applied}"
        state = self.record.state if self.alive else "lost"
        return f"{self.record.island_id} {self.record.url} ({state}, {applied}): {self.last_error or 'no error'}"


def jittered(failures: int) -> float:
    """Seconds to stay away after so many failures in a row: exponential, with a random half, so that the clients of
    an island that comes back do not all come back with it."""
    bound = min(MAX_COOLDOWN_S, FIRST_COOLDOWN_S * 2 ** min(failures - 1, 16))
    return bound * random.uniform(0.5, 1.0)


def least_loaded(
    islands: Iterable[Island], now: float, failed: Mapping[Life, int], prefer: str | None = None
) -> Island | None:
    """The open island with the least to do; one that already failed this group only when no other is open, and the
    preferred one unless it has more to do than its share."""
    open_ = [island for island in islands if island.open_at(now)]
    if not open_:
        return None
    best = min(open_, key=lambda i: (failed.get(i.life, 0), i.work_at(now), i.failures, i.order))
    for island in open_:
        if (
            island.record.island_id == prefer
            and not failed.get(island.life)
            and island.work_at(now) <= (best.work_at(now) + 1)
        ):
            return island
    return best


class Directory:
    """Keeps the list of islands and their load up to date. `changed` is set when a place became free."""

    def __init__(
        self,
        discover: Callable[[], Sequence[IslandRecord]],
        http: httpx.AsyncClient,
        window: int,
        metrics: ClientMetrics,
    ) -> None:
        self.known: dict[str, Island] = {}
        self.error = ""
        self.changed = asyncio.Event()
        self._discover = discover
        self._http = http
        self._window = window
        self._metrics = metrics
        self._refreshed_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None

    def ready(self, without: Collection[Life] = ()) -> list[Island]:
        return [island for island in self.known.values() if island.ready and island.life not in without]

    def lines(self) -> str:
        return "; ".join(island.line() for island in self.known.values())

    async def refresh(self) -> None:
        """Read the list again when it is old. Several callers at once read it once."""
        async with self._refreshing:
            if time.monotonic() < self._refreshed_at + REFRESH_S:
                return
            try:
                records = await asyncio.to_thread(self._discover)
            except (SprawlError, OSError) as error:
                self.error = f"the list of islands could not be read: {error}"
            else:
                self.error = ""
                self._update(records)
            self._refreshed_at = time.monotonic()
        if len(self.ready()) > 1 and (self._looking is None or self._looking.done()):
            self._looking = asyncio.ensure_future(self._look())  # nobody waits for it

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def take(self, island: Island) -> None:
        island.load += 1

    def release(self, island: Island) -> None:
        island.load -= 1
        self.changed.set()

    def succeeded(self, island: Island) -> None:
        island.failures = 0
        island.window = min(float(self._window), island.window + 1 / max(1.0, island.window))

    def rest(self, island: Island, error: str, pause_s: float, *, crowded: bool) -> None:
        """Leave an island alone for a while. `crowded`: it has too much to do, so send it less from now on."""
        island.last_error = error
        island.failures += 1
        island.rested_at = time.monotonic() + max(pause_s * random.uniform(1.0, 1.25), jittered(island.failures))
        if crowded and island.load > 1:
            island.window = max(1.0, island.window / 2)
            self._metrics.islands_slowed += 1
        self._refreshed_at = float("-inf")  # the list may be what is wrong
        log.warning("%s: %s; retrying elsewhere", island.record.island_id, error)

    def _update(self, records: Sequence[IslandRecord]) -> None:
        now = time.time()
        seen = {record.island_id: record for record in records}
        for island_id, record in seen.items():
            known = self.known.get(island_id)
            if known is None or known.record.started_at != record.started_at:
                if known is not None:
                    self._lose(known)
                self.known[island_id] = known = Island(record, float(self._window))
            known.record = record
            if now - record.heartbeat_at <= LOST_AFTER_INTERVALS * record.interval_s:
                known.alive = True
            else:
                self._lose(known)
        for island_id in self.known.keys() - seen.keys():
            self._lose(self.known[island_id])

    def _lose(self, island: Island) -> None:
        self._metrics.islands_lost += island.alive
        island.alive = False

    async def _look(self) -> None:
        """Ask the islands looked at longest ago how much they have to do. A heartbeat would be seconds old."""
        oldest = sorted(self.ready(), key=lambda island: island.looked_at)[:PROBES]
        await asyncio.gather(*(self._look_at(island) for island in oldest))

    async def _look_at(self, island: Island) -> None:
        ours = island.load
        with suppress(httpx.HTTPError, ValidationError):
            answer = await self._http.get(f"{island.record.url.rstrip('/')}/server_info", timeout=PROBE_S)
            island.others = max(0, Seen.model_validate_json(answer.content).active_requests - ours)
            island.looked_at = time.monotonic()
