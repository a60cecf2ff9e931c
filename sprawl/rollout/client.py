"""The versioned client: groups in, groups out, over whatever islands the board shows as ready right now.

An island that is lost, drains, or cannot serve a version in time costs a retry elsewhere, never a group. The versions
of every answer are checked again here, against what was asked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

import httpx
from pydantic import ValidationError

from sprawl.board.records import IslandRecord
from sprawl.errors import SprawlError
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, NotReady, Sample

log = logging.getLogger(__name__)

REFRESH_S = 1.0  # age of the island list after which it is read again
FIRST_COOLDOWN_S = 0.25
MAX_COOLDOWN_S = 4.0
LOST_AFTER_INTERVALS = 3


class _TryElsewhere(Exception):
    """This attempt failed in a way that another attempt may not."""


class _Passed(Exception):
    """This island will never serve the request: it is past the version asked for."""


@dataclass
class _Island:
    record: IslandRecord
    load: int = 0
    failures: int = 0
    rested_at: float = 0.0  # monotonic time from which it is asked again
    last_error: str = ""
    alive: bool = True

    @property
    def key(self) -> tuple[str, float]:
        """One life of an island: a restarted one may serve again what the old one was past."""
        return self.record.island_id, self.record.started_at

    def line(self) -> str:
        applied = "no version" if self.record.applied is None else f"version {self.record.applied}"
        state = self.record.state if self.alive else "lost"
        return f"{self.record.island_id} {self.record.url} ({state}, {applied}): {self.last_error or 'no error'}"


@dataclass
class _Attempts:
    """What one group has been through."""

    deadline: float
    passed: dict[tuple[str, float], str] = field(default_factory=dict)  # island -> its refusal


class RolloutClient:
    """`discover` returns the heartbeat records of the board (it may block: it runs in a thread). `timeout_s` is the
    deadline of one group, retries included. `token` defaults to $SPRAWL_TOKEN.

    Belongs to one event loop; `async with` or `close()` ends it.
    """

    def __init__(
        self,
        discover: Callable[[], Sequence[IslandRecord]],
        *,
        timeout_s: float,
        concurrency_per_island: int = 2,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        token = token if token is not None else os.environ.get("SPRAWL_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # No read timeout: an attempt ends with its group's deadline, or when its island's heartbeat stops.
        timeout = httpx.Timeout(None, connect=min(5.0, timeout_s))
        self._http = httpx.AsyncClient(
            headers=headers, timeout=timeout, transport=transport, limits=httpx.Limits(max_connections=None)
        )
        self._discover = discover
        self._timeout_s = timeout_s
        self._concurrency = concurrency_per_island
        self._islands: dict[str, _Island] = {}
        self._refreshed_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._freed = asyncio.Event()
        self._discovery_error = ""

    async def __aenter__(self) -> RolloutClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def generate_many(self, requests: Sequence[GenerateRequest]) -> list[GenerateResponse]:
        """Answers in the order of the requests. The first group that fails for good cancels the rest."""
        tasks = [asyncio.ensure_future(self.generate(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """One group from the least loaded ready island. The deadline starts when an island first could be asked or is
        waited for, not while the group queues behind others of this client.

        Raises SprawlError: the deadline passed (naming the islands and their last errors), every ready island is
        past the version, or the request itself was refused.
        """
        attempts = _Attempts(deadline=time.monotonic() + self._timeout_s)
        while True:
            island = await self._take(attempts)
            try:
                response = await self._attempt(island, request, attempts.deadline)
            except _Passed as error:
                attempts.passed[island.key] = str(error)
            except _TryElsewhere as error:
                self._rest(island, str(error))
            else:
                island.failures = 0
                return response
            finally:
                island.load -= 1
                self._freed.set()

    # --- which island ---

    async def _take(self, attempts: _Attempts) -> _Island:
        """Reserve a place on the least loaded ready island, waiting for one if need be."""
        while True:
            await self._refresh()
            now = time.monotonic()
            ready = [i for i in self._islands.values() if i.alive and i.record.state == "ready"]
            left = [island for island in ready if island.key not in attempts.passed]
            if ready and not left:
                raise SprawlError(next(iter(attempts.passed.values())), "ask for a version that is still served")
            if now >= attempts.deadline:
                raise self._timed_out()
            open_ = [island for island in left if island.load < self._concurrency and island.rested_at <= now]
            if open_:
                island = min(open_, key=lambda i: (i.load, i.failures, i.record.island_id))
                island.load += 1
                return island
            if any(island.load and not island.failures for island in left):
                # Queued behind our own groups, which make progress: the clock of this one has not started.
                attempts.deadline = max(attempts.deadline, now + self._timeout_s)
            self._freed.clear()
            wake_at = min([i.rested_at for i in left if i.rested_at > now] + [now + REFRESH_S, attempts.deadline])
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, wake_at - now)):
                    await self._freed.wait()

    def _rest(self, island: _Island, error: str) -> None:
        island.last_error = error
        island.failures += 1
        pause = min(MAX_COOLDOWN_S, FIRST_COOLDOWN_S * 2 ** (island.failures - 1))
        island.rested_at = time.monotonic() + pause
        self._refreshed_at = float("-inf")  # the list may be what is wrong
        log.warning("%s: %s; retrying elsewhere", island.record.island_id, error)

    async def _refresh(self) -> None:
        async with self._refreshing:
            if time.monotonic() < self._refreshed_at + REFRESH_S:
                return
            try:
                records = await asyncio.to_thread(self._discover)
            except (SprawlError, OSError) as error:
                self._discovery_error = f"the list of islands could not be read: {error}"
            else:
                self._discovery_error = ""
                self._update(records)
            self._refreshed_at = time.monotonic()

    def _update(self, records: Sequence[IslandRecord]) -> None:
        now = time.time()
        seen = {record.island_id: record for record in records}
        for island_id, record in seen.items():
            known = self._islands.get(island_id)
            if known is None or known.record.started_at != record.started_at:
                if known is not None:
                    known.alive = False
                self._islands[island_id] = known = _Island(record)
            known.record = record
            known.alive = now - record.heartbeat_at <= LOST_AFTER_INTERVALS * record.interval_s
        for island_id in self._islands.keys() - seen.keys():
            self._islands[island_id].alive = False

    # --- one attempt ---

    async def _attempt(self, island: _Island, request: GenerateRequest, deadline: float) -> GenerateResponse:
        """Post, and give up early when the island's heartbeat stops: a machine that vanished never answers."""
        post = asyncio.ensure_future(self._post(island.record, request))
        try:
            while not post.done():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise _TryElsewhere("no answer before the deadline")
                await asyncio.wait({post}, timeout=min(REFRESH_S, remaining))
                if post.done():
                    break
                await self._refresh()
                if not island.alive or island.record.state == "failed":
                    raise _TryElsewhere("its heartbeat stopped while it was answering")
            return post.result()
        finally:
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)

    async def _post(self, record: IslandRecord, request: GenerateRequest) -> GenerateResponse:
        try:
            answer = await self._http.post(
                f"{record.url.rstrip('/')}/generate",
                content=request.model_dump_json(exclude_none=True),
                headers={"Content-Type": "application/json"},
            )
        except httpx.HTTPError as error:
            raise _TryElsewhere(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        if answer.status_code == 200:
            return _checked(answer, request)
        if answer.status_code == 409:
            refusal = _not_ready(answer)
            raise _TryElsewhere(refusal.message) if refusal.retryable else _Passed(refusal.message)
        message = _error_message(answer)
        if answer.status_code >= 500:
            raise _TryElsewhere(message)
        raise SprawlError(f"island {record.island_id} at {record.url} refused the request: {message}")

    def _timed_out(self) -> SprawlError:
        lines = "; ".join(island.line() for island in self._islands.values())
        lines = lines or self._discovery_error or "no island is registered on the board"
        return SprawlError(
            f"no island answered within {self._timeout_s:g} s: {lines}",
            "start an island with `sprawl island`, or raise rollout.timeout_s",
        )


def _checked(answer: httpx.Response, request: GenerateRequest) -> GenerateResponse:
    """Parse a 200 and hold it against the request; an island that answers something else is not trusted with it."""
    try:
        response = GenerateResponse.model_validate_json(answer.content)
    except ValidationError as error:
        raise _TryElsewhere(f"its answer is not a GenerateResponse: {error.errors()[0]['msg']}") from None
    if len(response.samples) != request.sampling_params.n:
        raise _TryElsewhere(f"{len(response.samples)} samples instead of {request.sampling_params.n}")
    for sample in response.samples:
        if not _well_formed(sample):
            raise _TryElsewhere("a sample whose log-probs or version spans do not cover its tokens")
        for span in sample.spans:
            if not request.weight_version.accepts(span.version):
                raise _TryElsewhere(f"tokens of version {span.version}, which the request does not accept")
    return response


def _well_formed(sample: Sample) -> bool:
    edges = [0] + [span.end for span in sample.spans]
    starts = [span.start for span in sample.spans]
    return (
        sample.finish_reason != "abort"
        and len(sample.token_ids) == len(sample.logprobs) == edges[-1]
        and starts == edges[:-1]
        and all(start < end for start, end in zip(starts, edges[1:], strict=True))
    )


def _not_ready(answer: httpx.Response) -> NotReady:
    try:
        return NotReady.model_validate_json(answer.content)
    except ValidationError:
        raise _TryElsewhere("an unreadable 409") from None


def _error_message(answer: httpx.Response) -> str:
    try:
        return f"{answer.status_code} {answer.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.text[:200]}"
