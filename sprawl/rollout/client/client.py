"""The versioned client: groups in, groups out, over whatever islands are ready right now.

An island that is lost, drains, or cannot serve a version in time costs a retry elsewhere, never a group. A group that
takes much longer than its like is asked for a second time on an island that has nothing to do; the first answer counts.
The versions of every answer are checked again here, against what was asked. Callers are held back by waiting: an
island gets no more at once than it takes without complaint.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import httpx

from sprawl.board.records import IslandRecord
from sprawl.errors import SprawlError
from sprawl.rollout.client.calls import Call, Completion, CompletionCall, GenerateCall, Passed, Route, TryElsewhere
from sprawl.rollout.client.hedging import Latencies, within_budget
from sprawl.rollout.client.islands import REFRESH_S, Directory, Island, Life, jittered, least_loaded
from sprawl.rollout.client.metrics import ClientMetrics
from sprawl.rollout.client.streaming import ContinuedCall
from sprawl.rollout.together import together
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, VersionPolicy

T = TypeVar("T")
CONNECT_S = 5.0


@dataclass
class _Group:
    """What one group has been through. `held`: islands that it does not ask before a time."""

    deadline: float
    prefer: str | None = None
    passed: dict[Life, str] = field(default_factory=dict)  # island -> its refusal
    failed: dict[Life, int] = field(default_factory=dict)
    held: dict[Life, float] = field(default_factory=dict)


class RolloutClient:
    """`discover` returns the islands: `Ledger.islands` for the heartbeats of a board, `listed(urls)` for a list. It may
    block: it runs in a thread. `timeout_s` is the deadline of one group, retries included. `token` defaults to
    $SPRAWL_TOKEN. `hedge`: the percentile of recent durations after which a group is a straggler, None to ask once.
    `continuation`: stream, and go on token by token where a lost island stopped, instead of sampling again.

    Belongs to one event loop; `async with` or `close()` ends it.
    """

    def __init__(
        self,
        discover: Callable[[], Sequence[IslandRecord]],
        *,
        timeout_s: float,
        concurrency_per_island: int = 2,
        token: str | None = None,
        hedge: float | None = 0.95,
        continuation: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        token = token if token is not None else os.environ.get("SPRAWL_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # No read timeout: an attempt ends with its group's deadline, or when its island's heartbeat stops.
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=timeout, transport=transport, limits=httpx.Limits(max_connections=None)
        )
        self.metrics = ClientMetrics()
        self._directory = Directory(discover, self._http, concurrency_per_island, self.metrics)
        self._timeout_s = timeout_s
        self._latencies = None if hedge is None else Latencies(hedge)
        self._continuation = continuation

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._directory.close()
        await self._http.aclose()

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResponse]:
        """Answers in the order of the requests. The first group that fails for good cancels the rest."""
        return await together(self.generate(request) for request in requests)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """One group from the least loaded ready island. The deadline starts when an island first could be asked or is
        waited for, not while the group queues behind others of this client.

        Raises SprawlError: the deadline passed (naming the islands and their last errors), every ready island is
        past the version, or the request itself was refused.
        """
        if self._continuation:
            return await self._serve(ContinuedCall(request, self.metrics))
        return await self._serve(GenerateCall(request))

    async def complete(
        self, route: Route, body: Mapping[str, Any], policy: VersionPolicy, *, prefer: str | None = None
    ) -> Completion:
        """One request to an OpenAI route, with the same care as a group. `prefer`: the island that served the turn
        before, which may still have it cached. Raises as `generate` does."""
        return await self._serve(CompletionCall(route, body, policy), prefer)

    async def _serve(self, call: Call[T], prefer: str | None = None) -> T:
        group = _Group(deadline=time.monotonic() + self._timeout_s, prefer=prefer)
        try:
            while True:
                island = await self._take(group)
                answer = await self._race(island, call, group)
                if answer is not None:
                    self.metrics.groups += 1
                    return answer
        except asyncio.CancelledError:
            self.metrics.cancelled_groups += 1
            raise
        except SprawlError:
            self.metrics.failed_groups += 1
            raise

    # --- which island ---

    async def _take(self, group: _Group) -> Island:
        """Reserve a place on the least loaded ready island, waiting for one if need be."""
        began = time.monotonic()
        directory = self._directory
        self.metrics.waiting += 1
        try:
            while True:
                await directory.refresh()
                now = time.monotonic()
                ready = directory.ready()
                left = [island for island in ready if island.life not in group.passed]
                if ready and not left:
                    raise SprawlError(next(iter(group.passed.values())), "ask for a version that is still served")
                if now >= group.deadline:
                    raise self._timed_out()
                askable = [island for island in left if group.held.get(island.life, 0.0) <= now]
                if island := least_loaded(askable, now, group.failed, group.prefer):
                    directory.take(island)
                    return island
                if any(island.load and not island.failures for island in askable):
                    # Queued behind our own groups, which make progress: the clock of this one has not started.
                    group.deadline = max(group.deadline, now + self._timeout_s)
                directory.changed.clear()
                times = [max(i.rested_at, group.held.get(i.life, 0.0)) for i in left]
                wake_at = min([at for at in times if at > now] + [now + REFRESH_S, group.deadline])
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.01, wake_at - now)):
                        await directory.changed.wait()
        finally:
            self.metrics.waiting -= 1
            self.metrics.queue_seconds += time.monotonic() - began

    # --- attempts ---

    async def _race(self, island: Island, call: Call[T], group: _Group) -> T | None:
        """Ask the island, and a second one if it takes too long. None: no answer, and `group` says who failed."""
        running = {asyncio.ensure_future(self._ask(island, call, group)): island}
        hedged: Island | None = None
        began = time.monotonic()
        patience = self._latencies.patience(call.size) if self._latencies is not None else None
        try:
            while running:
                wait_s = None if patience is None else max(0.0, began + patience - time.monotonic())
                done, _ = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    patience = None  # once
                    if hedged := self._second(island, group):
                        running[asyncio.ensure_future(self._ask(hedged, call, group))] = hedged
                for task in done:
                    winner = running.pop(task)
                    answer = task.result()
                    if answer is not None:
                        self.metrics.hedges_won += winner is hedged
                        return answer
            return None
        finally:
            for task in running:
                task.cancel()
                self.metrics.losers_cancelled += hedged is not None
            await asyncio.gather(*running, return_exceptions=True)

    def _second(self, first: Island, group: _Group) -> Island | None:
        """An island for a second request: one that has nothing to do, while no group waits for a place."""
        now = time.monotonic()
        free = [
            island
            for island in self._directory.ready(without=[first.life, *group.passed, *group.failed])
            if not island.work_at(now)
        ]
        metrics = self.metrics
        island = least_loaded(free, now, group.failed)
        if island is None or metrics.waiting or not within_budget(metrics.hedges, metrics.groups):
            metrics.hedges_skipped += 1
            return None
        metrics.hedges += 1
        self._directory.take(island)
        return island

    async def _ask(self, island: Island, call: Call[T], group: _Group) -> T | None:
        """One attempt on a place that was reserved. None: it failed, and what that means was noted."""
        self.metrics.attempts += 1
        self.metrics.in_flight += 1
        began = time.monotonic()
        try:
            answer = await self._watched(island, call, group)
        except Passed as error:
            group.passed[island.life] = str(error)
            self.metrics.failures["passed"] += 1
        except TryElsewhere as error:
            self.metrics.failures[error.reason] += 1
            failures = group.failed[island.life] = group.failed.get(island.life, 0) + 1
            if error.reason == "behind":
                # Only this group asks for too much here: others need not stay away.
                island.last_error = str(error)
                group.held[island.life] = time.monotonic() + jittered(failures)
            else:
                self._directory.rest(island, str(error), error.pause_s, crowded=error.reason == "unavailable")
        else:
            seconds = time.monotonic() - began
            self.metrics.answer_seconds += seconds
            self.metrics.answers_by_island[island.record.island_id] += 1
            if self._latencies is not None:
                self._latencies.add(call.size, seconds)
            self._directory.succeeded(island)
            return answer
        finally:
            self.metrics.in_flight -= 1
            self._directory.release(island)
        return None

    async def _watched(self, island: Island, call: Call[T], group: _Group) -> T:
        """Ask, and give up early when the island's heartbeat stops: a machine that vanished never answers."""
        remaining = group.deadline - time.monotonic()
        post = asyncio.ensure_future(
            call.attempt(self._http, island.record, connect_s=max(0.01, min(CONNECT_S, remaining)))
        )
        try:
            while not post.done():
                remaining = group.deadline - time.monotonic()
                if remaining <= 0:
                    raise TryElsewhere("deadline", "no answer before the deadline")
                await asyncio.wait({post}, timeout=min(REFRESH_S, remaining))
                if post.done():
                    break
                await self._directory.refresh()
                if not island.alive or island.record.state == "failed":
                    raise TryElsewhere("lost", "its heartbeat stopped while it was answering")
            return post.result()
        finally:
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)

    def _timed_out(self) -> SprawlError:
        lines = self._directory.lines() or self._directory.error or "no island is registered on the board"
        return SprawlError(
            f"no island answered within {self._timeout_s:g} s: {lines}",
            "start an island with `sprawl island`, or raise rollout.timeout_s",
        )
