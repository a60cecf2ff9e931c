"""/generate as a stream, so that what a lost island had generated is not lost with it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from sprawl.board.records import IslandRecord
from sprawl.errors import SprawlError
from sprawl.rollout.client.calls import TryElsewhere, broken, judge, read_generation
from sprawl.rollout.client.checks import span_fault
from sprawl.rollout.client.metrics import ClientMetrics
from sprawl.rollout.continuation import Progress
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, VersionSpan


@dataclass
class ContinuedCall:
    """/generate, streamed. An attempt that breaks off leaves its tokens in `progress`; the next one asks an island for
    the rest. Two attempts at once (a hedge) go on from the same place; the one that came further is kept. `keeps` ends
    with the first island that refuses to continue."""

    request: GenerateRequest
    metrics: ClientMetrics
    progress: Progress = field(init=False)
    keeps: bool = True

    def __post_init__(self) -> None:
        self.progress = Progress.start(self.request.sampling_params.n)

    @property
    def size(self) -> int:
        return self.request.sampling_params.n * self.request.sampling_params.max_new_tokens

    async def attempt(self, http: httpx.AsyncClient, record: IslandRecord, connect_s: float) -> GenerateResponse:
        """See `Call.attempt`."""
        try:
            return await self._attempt(http, record, connect_s)
        except SprawlError:
            if not self.progress.tokens:
                raise
            # It may be the continuation alone that is refused: from here on the group is sampled whole.
            self.keeps, self.progress = False, Progress.start(self.request.sampling_params.n)
            return await self._attempt(http, record, connect_s)

    async def _attempt(self, http: httpx.AsyncClient, record: IslandRecord, connect_s: float) -> GenerateResponse:
        before = self.progress
        asked = before.request(self.request)
        reached = before.copy()
        if before.tokens:
            self.metrics.continuations += 1
        try:
            async with aclosing(_events(http, record, asked, connect_s)) as events:
                async for event in events:
                    if "samples" not in event:
                        _advance(reached, event, record.island_id, asked)
                        continue
                    response = read_generation(json.dumps(event), asked)
                    _compare(response, before, reached)
                    self.metrics.continued_tokens += before.tokens
                    return before.completed(response)
            raise TryElsewhere("reset", "its stream ended before the answer did")
        except TryElsewhere as error:
            if error.reason == "lie":
                reached = before  # nothing from an island that was caught
            raise
        finally:
            if self.keeps and reached.tokens > self.progress.tokens:
                self.progress = reached


async def _events(
    http: httpx.AsyncClient, record: IslandRecord, asked: GenerateRequest, connect_s: float
) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON events of the stream. Raises what `judge` makes of a refusal, and TryElsewhere for a broken stream."""
    body = {**asked.model_dump(exclude_none=True), "stream": True}
    try:
        async with http.stream(
            "POST",
            f"{record.url.rstrip('/')}/generate",
            json=body,
            timeout=httpx.Timeout(None, connect=connect_s),
        ) as answer:
            if answer.status_code != 200:
                raise judge(answer.status_code, answer.headers, await answer.aread(), record)
            async for line in answer.aiter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    yield _event(data)
    except httpx.HTTPError as error:
        raise broken(error) from None


def _event(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise TryElsewhere("lie", "an event that is not JSON") from None
    if not isinstance(event, dict):
        raise TryElsewhere("lie", "an event that is no object")
    if "error" in event:
        message = event["error"].get("message") if isinstance(event["error"], dict) else event["error"]
        raise TryElsewhere("unavailable", f"it broke off: {message}")
    return event


def _advance(reached: Progress, event: dict[str, Any], island_id: str, asked: GenerateRequest) -> None:
    """Add what an event tells. Tokens whose version is not known yet are left out: they cannot be vouched for."""
    try:
        row = reached.rows[event["index"]]
        tokens, logprobs, given = event["output_ids"], event["logprobs"], event["weight_versions"]
        if given is None or not tokens:
            return
        spans = [VersionSpan.model_validate(span) for span in given]
        # Spans count from the first token of this stream; a hole means that a version was not known before.
        taken = len(asked.sampling_params.resume[event["index"]]) if asked.sampling_params.resume else 0
        if spans[0].start + taken != len(row.token_ids) or spans[-1].end - spans[0].start != len(tokens):
            return
        if fault := span_fault(spans, asked.weight_version):
            raise TryElsewhere("lie", fault)
        versions = [span.version for span in spans for _ in range(span.start, span.end)]
        last = row.spans[-1] if row.spans else None
        if last is not None and last.island_id == island_id and last.version > versions[0]:
            raise TryElsewhere("lie", f"tokens of version {versions[0]} after those of version {last.version}")
        for token, logprob, version in zip(tokens, logprobs, versions, strict=True):
            row.push(int(token), float(logprob), version, island_id)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise TryElsewhere("lie", f"an event that does not say what it has to: {type(error).__name__}") from None


def _compare(response: GenerateResponse, before: Progress, reached: Progress) -> None:
    """The whole answer must be the one that was streamed."""
    for old, now, sample in zip(before.rows, reached.rows, response.samples, strict=True):
        streamed = now.token_ids[len(old.token_ids) :]
        if sample.token_ids[: len(streamed)] != streamed:
            raise TryElsewhere("lie", "its answer is not what it streamed")
