"""Streams of all three routes: each token with the version that made it, also across a swap in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sprawl.board.reader import VersionReader
from sprawl.policy import Architecture, Decoder
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.torch_engine import TorchEngine
from tests.rollout.processes import CONFIG, DiskRun
from tests.rollout.served import serving
from tests.rollout.support import RUN, Stack, TinyRun, go
from tests.rollout.test_openai import events_of
from tests.rollout.test_sidecar import ROUTES, with_client

TOKENS = 60


class EndTeller:
    """The fake without `watched_version`: an engine that tells versions at the end only."""

    def __init__(self, inner: FakeEngine) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "watched_version":
            raise AttributeError(name)
        return getattr(self._inner, name)


def body(route: str, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    limit = {"sampling_params": {"max_new_tokens": tokens}} if route == "/generate" else {"max_tokens": tokens}
    ids = {} if route == "/generate" else {"return_token_ids": True}
    return {**ROUTES[route], **limit, **ids, "stream": True, **more}


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def part_of(event: dict[str, Any]) -> dict[str, Any] | None:
    """The part that belongs to one token, None for what comes at the end."""
    if "choices" in event:
        choice = event["choices"][0]
        return {**choice, "output_ids": choice["token_ids"]} if choice["token_ids"] else None
    return event if "output_ids" in event and "samples" not in event else None


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_a_swap_in_the_middle_of_a_stream(route: str, tells: bool) -> None:
    async def scenario() -> None:
        run = TinyRun().publish(1)
        engine: Any = FakeEngine(token_s=0.005)
        if not tells:
            engine = EndTeller(engine)
        stack = Stack(run, engine, follow="eager", chat_template="{{ messages[0].content }}")
        seen: list[tuple[int, int | None]] = []
        last: dict[str, Any] = {}
        async with (
            stack,
            serving(stack) as url,
            httpx.AsyncClient(base_url=url, timeout=20) as client,
            client.stream("POST", route, json=body(route)) as response,
        ):
            assert response.headers["content-type"].startswith("text/event-stream")
            async for event in events(response):
                part = part_of(event)
                if part is None:
                    last = event
                    continue
                spans = part["weight_versions"]
                position = len(seen)
                if spans is not None:
                    assert (spans[0]["start"], spans[0]["end"]) == (position, position + 1)
                seen.append((part["output_ids"][0], spans and spans[0]["version"]))
                if len(seen) == 5:
                    run.publish()
                    stack.reconciler.wake()
        made = [token for token, _ in seen]
        assert len(made) == TOKENS
        assert set(made) == {0, 1}
        assert all(said == token or (said is None and not tells) for token, said in seen)
        assert all(said == 0 for _, said in seen[:5])
        spans = last["samples"][0]["spans"] if route == "/generate" else last["choices"][0]["weight_versions"]
        first = made.count(0)
        assert spans == [
            {"version": 0, "start": 0, "end": first},
            {"version": 1, "start": first, "end": TOKENS},
        ]
        assert (last["weight_version_start"], last["weight_version_end"]) == (0, 1)

    go(scenario())


def test_a_generate_stream_adds_up_to_the_whole_answer() -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        wanted = {"input_ids": [5], "sampling_params": {"n": 3, "max_new_tokens": 7, "seeds": [1, 2, 3]}}
        whole = (await client.post("/generate", json=wanted)).json()
        *tokens, last = events_of((await client.post("/generate", json={**wanted, "stream": True})).text)
        assert last == whole
        for index, sample in enumerate(whole["samples"]):
            mine = [event for event in tokens if event["index"] == index]
            assert [token for event in mine for token in event["output_ids"]] == sample["token_ids"]
            assert [logprob for event in mine for logprob in event["logprobs"]] == sample["logprobs"]

    with_client(check)


@pytest.mark.parametrize("route", ROUTES)
def test_a_refused_stream_is_a_status(route: str) -> None:
    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        late = await client.post(route, json=body(route, weight_version={"min_version": 9}))
        assert (late.status_code, late.json()["type"]) == (409, "WeightVersionNotReady")

    with_client(check, max_wait_s=0.05, chat_template="{{ messages[0].content }}")


def test_an_engine_that_lies_about_versions_is_not_passed_on() -> None:
    class Liar(FakeEngine):
        async def generate(self, *arguments: Any) -> Any:
            samples = await super().generate(*arguments)
            return [
                sample.model_copy(update={"spans": [span.model_copy(update={"version": 9}) for span in sample.spans]})
                for sample in samples
            ]

    class Silent(FakeEngine):
        async def generate(self, *arguments: Any) -> Any:
            return [sample.model_copy(update={"spans": []}) for sample in await super().generate(*arguments)]

    async def check(client: httpx.AsyncClient, stack: Stack) -> None:
        answer = await client.post("/generate", json={"input_ids": [5]})
        assert answer.status_code == 503
        assert stack.service.counters.engine_errors == 1

    with_client(check, engine=Liar())
    with_client(check, engine=Silent())


def test_the_embedded_engine_tells_versions_as_it_goes(tmp_path: Path) -> None:
    """Its own tokens say nothing about versions, so the stream is held against the spans at the end."""

    async def scenario() -> None:
        run = DiskRun(tmp_path / "runs")
        run.publish()
        engine = TorchEngine(Decoder(Architecture.from_hf(CONFIG)))
        stack = Stack(TinyRun(), engine, follow="eager", reader=VersionReader(run.store, RUN), max_wait_s=20)
        said: dict[int, list[int]] = {0: [], 1: []}
        last: dict[str, Any] = {}
        wanted = {"input_ids": [5], "stream": True, "sampling_params": {"n": 2, "max_new_tokens": 300}}
        async with (
            stack,
            serving(stack) as url,
            httpx.AsyncClient(base_url=url, timeout=20) as client,
            client.stream("POST", "/generate", json=wanted) as response,
        ):
            async for event in events(response):
                if "samples" in event:
                    last = event
                    continue
                said[event["index"]].append(event["weight_versions"][0]["version"])
                if len(said[0]) in (10, 60) and event["index"] == 0:
                    await asyncio.to_thread(run.publish)
                    stack.reconciler.wake()
        assert last["weight_version_start"] < last["weight_version_end"]
        for index, sample in enumerate(last["samples"]):
            spans = [span["version"] for span in sample["spans"] for _ in range(span["start"], span["end"])]
            assert said[index] == spans

    go(scenario(), 60)
