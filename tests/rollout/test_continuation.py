"""A generation that breaks off on one island goes on, token by token, on another."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from sprawl.config import RolloutConfig
from sprawl.errors import SprawlError
from sprawl.rollout.client import RolloutClient
from sprawl.rollout.continuation import Progress, resumed
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.wire import GenerateResponse, Sample, SamplingParams, VersionSpan
from tests.rollout.islands import live, record, request
from tests.rollout.support import Stack, TinyRun, go, until
from tests.rollout.test_torch_engine import engine_at, served

PROMPT = [5, 6, 7]
GROUP = SamplingParams(n=4, max_new_tokens=12, temperature=1.0, seeds=[1, 2, 3, 4], stop_token_ids=[3])


def bits(sample: Sample) -> tuple[list[int], list[str]]:
    return sample.token_ids, [value.hex() for value in sample.logprobs]


# --- the embedded engine goes on as if it had sampled the first tokens itself ---


def test_what_follows_is_bit_for_bit_what_an_undisturbed_generation_has_there() -> None:
    async def scenario() -> None:
        first, second = await engine_at(1, eos_ids=[0]), await engine_at(1, eos_ids=[0])
        rng = random.Random(5)
        for number in range(10):
            group = GROUP.model_copy(update={"seeds": [number * 4 + row for row in range(4)]})
            whole = await first.generate(PROMPT, group)
            for _ in range(2):
                taken = [sample.token_ids[: rng.randint(0, len(sample.token_ids))] for sample in whole]
                rest = await second.generate(PROMPT, group.model_copy(update={"resume": taken}))
                for sample, before, after in zip(whole, taken, rest, strict=True):
                    assert [*before, *after.token_ids] == sample.token_ids
                    assert bits(after)[1] == bits(sample)[1][len(before) :]
                    assert after.finish_reason == sample.finish_reason
                    assert sum(span.end - span.start for span in after.spans) == len(after.token_ids)
        await first.close()
        await second.close()

    go(scenario())


def test_a_resumed_sample_that_was_complete_stays_so() -> None:
    async def scenario() -> None:
        engine = await engine_at(1, eos_ids=[0])
        resume = [[8, 3], [8, 0], [9] * 12, [9]]
        rest = await engine.generate(PROMPT, GROUP.model_copy(update={"resume": resume}))
        assert [sample.finish_reason for sample in rest[:3]] == ["stop", "stop", "length"]
        assert [sample.token_ids for sample in rest[:3]] == [[], [], []]
        assert 0 < len(rest[3].token_ids) <= 11
        await engine.close()

    go(scenario())


# --- engines that cannot: every sample is a request of its own ---


def test_engines_that_cannot_resume_are_given_prompts_that_end_in_what_there_is() -> None:
    class Recording(FakeEngine):
        asked: list[tuple[list[int], SamplingParams]]

        async def generate(self, input_ids: Any, params: SamplingParams, watch: Any = None) -> list[Sample]:
            self.asked.append((list(input_ids), params))
            return await super().generate(input_ids, params, watch)

    async def scenario() -> list[tuple[list[int], SamplingParams]]:
        engine = Recording()
        engine.asked = []
        await engine.load(served(7))
        seen: list[tuple[int, int]] = []

        def watch(row: int, token: int, logprob: float) -> bool:
            seen.append((row, token))
            return False

        params = GROUP.model_copy(update={"resume": [[8], [], [8, 3], [4, 1]], "max_new_tokens": 3})
        rest = await resumed(engine, PROMPT, params, eos_ids=[1], watch=watch)
        assert [sample.token_ids for sample in rest] == [[7, 7], [7, 7, 7], [], []]
        assert [sample.finish_reason for sample in rest] == ["length", "length", "stop", "stop"]
        assert sorted(seen) == [(0, 7)] * 2 + [(1, 7)] * 3
        return engine.asked

    asked = go(scenario())
    assert [(prompt, p.n, p.max_new_tokens, p.resume) for prompt, p in asked] == [
        ([*PROMPT, 8], 1, 2, None),
        (PROMPT, 1, 3, None),
    ]
    assert asked[1][1].seeds == [2]  # nothing was taken: the sample's own
    assert asked[0][1].seeds != [1]  # its numbers at the first places are spent
    assert go(scenario()) == asked


# --- client and islands ---


def islands_at(*versions: int, token_s: float) -> list[Stack]:
    """Islands whose boards end at different versions; the fake engine's tokens are its version."""
    return [Stack(TinyRun().publish(version + 1), FakeEngine(token_s=token_s), follow="eager") for version in versions]


def test_tokens_of_a_lost_island_are_kept_and_every_span_says_whose_it_is() -> None:
    async def scenario() -> None:
        async with live(*islands_at(5, 7, token_s=0.02)) as islands:
            await until(lambda: [i.stack.gate.version for i in islands] == [5, 7])
            records = [record(i.island_id, i.url) for i in islands]
            wanted = request(SamplingParams(n=3, max_new_tokens=40), min_version=5)
            async with RolloutClient(lambda: records, timeout_s=20, continuation=True) as client:
                client._directory.known.clear()
                await client._directory.refresh()
                client._directory.known["island-1"].failures = 1  # the other one is asked first
                work = asyncio.ensure_future(client.generate(wanted))
                await until(lambda: islands[0].stack.gate.active == 1)
                await asyncio.sleep(0.2)
                islands[0].die()
                answer = await work
                assert client.metrics.continuations == 1
                kept = client.metrics.continued_tokens
            assert answer.island_id == "island-1"
            assert (answer.weight_version_start, answer.weight_version_end) == (5, 7)
            assert kept == sum(span.end for sample in answer.samples for span in sample.spans[:1])
            for sample in answer.samples:
                assert len(sample.token_ids) == len(sample.logprobs) == 40
                (one, other) = sample.spans
                assert (one.version, one.island_id, other.version, other.island_id) == (5, "island-0", 7, "island-1")
                assert 0 < one.end == other.start < other.end == 40
                assert sample.token_ids == [5] * one.end + [7] * (40 - one.end)

    go(scenario())


def test_without_it_a_lost_group_is_sampled_again_from_the_start() -> None:
    assert RolloutConfig().continuation is False

    async def scenario() -> None:
        async with live(*islands_at(5, 7, token_s=0.02)) as islands:
            await until(lambda: [i.stack.gate.version for i in islands] == [5, 7])
            records = [record(i.island_id, i.url) for i in islands]
            async with RolloutClient(lambda: records, timeout_s=20) as client:
                await client._directory.refresh()
                client._directory.known["island-1"].failures = 1
                work = asyncio.ensure_future(client.generate(request(SamplingParams(n=3, max_new_tokens=40))))
                await until(lambda: islands[0].stack.gate.active == 1)
                await asyncio.sleep(0.2)
                islands[0].die()
                answer = await work
            assert {tuple(sample.token_ids) for sample in answer.samples} == {(7,) * 40}
            assert client.metrics.continuations == 0

    go(scenario())


def stream(*events: dict[str, Any], done: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + (["data: [DONE]\n\n"] if done else [])
    return httpx.Response(200, text="".join(lines), headers={"Content-Type": "text/event-stream"})


def token(index: int, at: int, value: int, version: int | None) -> dict[str, Any]:
    spans = None if version is None else [{"version": version, "start": at, "end": at + 1}]
    return {
        "index": index,
        "text": "",
        "output_ids": [value],
        "logprobs": [-0.5],
        "weight_versions": spans,
        "finish_reason": None,
    }


def whole(values: list[int], version: int) -> dict[str, Any]:
    span = [VersionSpan(version=version, start=0, end=len(values))] if values else []
    sample = Sample(token_ids=values, logprobs=[-0.5] * len(values), finish_reason="length", spans=span)
    response = GenerateResponse(
        samples=[sample], weight_version_start=version, weight_version_end=version, island_id="b"
    )
    return response.model_dump()


ONE = request(SamplingParams(max_new_tokens=4), min_version=3).model_copy(update={"input_ids": [5]})


def meet(first: Any, later: Any) -> tuple[GenerateResponse, list[Any], RolloutClient]:
    """What comes of ONE when island a answers it first, and b afterwards; and what b was asked to resume."""
    resumes: list[Any] = []

    def handle(posted: httpx.Request) -> httpx.Response:
        if posted.method == "GET":
            return httpx.Response(404)
        body = json.loads(posted.content)
        assert body["stream"] is True
        if posted.url.host == "a":
            return first
        resumes.append(body["sampling_params"].get("resume"))
        return later(body) if callable(later) else later

    async def scenario() -> tuple[GenerateResponse, list[Any], RolloutClient]:
        records = [record("a", "http://a"), record("b", "http://b")]
        transport = httpx.MockTransport(handle)
        async with RolloutClient(lambda: records, timeout_s=5, continuation=True, transport=transport) as client:
            await client._directory.refresh()
            client._directory.known["b"].failures = 1
            return await client.generate(ONE), resumes, client

    return go(scenario())


def test_tokens_whose_version_is_not_known_are_not_kept() -> None:
    broken = stream(token(0, 0, 8, 3), token(0, 1, 9, None), token(0, 2, 9, 4), done=False)
    answer, resumes, _ = meet(broken, stream(whole([1, 1, 1], 5)))
    assert resumes == [[[8]]]
    assert answer.samples[0].token_ids == [8, 1, 1, 1]
    spans = [(span.version, span.start, span.end, span.island_id) for span in answer.samples[0].spans]
    assert spans == [(3, 0, 1, "a"), (5, 1, 4, "b")]


@pytest.mark.parametrize(
    "liar",
    [
        stream(token(0, 0, 8, 3), token(0, 1, 8, 2)),  # a version that was not asked for
        stream(token(0, 0, 8, 3), whole([9, 9, 9, 9], 3)),  # an answer that is not what was streamed
        stream(token(0, 0, 8, 3), token(7, 0, 8, 3)),  # a sample that does not exist
        stream(token(0, 0, 8, 3), {"index": 0}),
        stream(token(0, 0, 8, 4), token(0, 1, 8, 3)),  # versions that go back
    ],
)
def test_nothing_is_kept_from_an_island_that_was_caught(liar: httpx.Response) -> None:
    answer, resumes, client = meet(liar, stream(whole([1, 1, 1, 1], 5)))
    assert resumes == [None]
    assert answer.samples[0].token_ids == [1, 1, 1, 1]
    assert client.metrics.failures["lie"] == 1


def test_an_error_in_the_stream_keeps_what_came_before() -> None:
    failed = stream(token(0, 0, 8, 3), {"error": {"type": "EngineUnavailable", "message": "gone"}}, done=False)
    answer, resumes, _ = meet(failed, stream(whole([1, 1, 1], 5)))
    assert (resumes, answer.samples[0].token_ids) == ([[[8]]], [8, 1, 1, 1])


def test_islands_that_do_not_continue_are_asked_for_the_whole_group() -> None:
    def older(body: dict[str, Any]) -> httpx.Response:
        if "resume" in body["sampling_params"]:
            return httpx.Response(400, json={"error": {"type": "BadRequest", "message": "unknown key 'resume'"}})
        return stream(whole([1, 1, 1, 1], 5))

    answer, resumes, _ = meet(stream(token(0, 0, 8, 3), done=False), older)
    assert (resumes[0], resumes[-1]) == ([[8]], None)
    assert answer.samples[0].token_ids == [1, 1, 1, 1]


def test_a_complete_sample_whose_end_was_not_heard_is_not_sampled_on() -> None:
    """All tokens came, the answer did not: the next island says that nothing is missing."""

    async def scenario() -> None:
        async with live(*islands_at(3, token_s=0.0)) as (island,):
            progress = Progress.start(1)
            for _ in range(4):
                progress.rows[0].push(8, -0.5, 3, "gone")
            asked = progress.request(ONE)
            async with httpx.AsyncClient() as http:
                got = await http.post(f"{island.url}/generate", content=asked.model_dump_json(exclude_none=True))
            assert got.status_code == 200, got.text
            answer = progress.completed(GenerateResponse.model_validate_json(got.content))
            assert (answer.samples[0].token_ids, answer.samples[0].finish_reason) == ([8] * 4, "length")
            assert (answer.weight_version_start, answer.weight_version_end) == (3, 3)

    go(scenario())


@pytest.mark.parametrize(
    ("resume", "said"),
    [([[1], [2]], "2 entries for n=1"), ([[1] * 5], "more than max_new_tokens=4"), ([[70_000]], "outside the vocab")],
)
def test_what_cannot_be_resumed_is_refused(resume: list[list[int]], said: str) -> None:
    async def scenario() -> None:
        async with live(*islands_at(3, token_s=0.0)) as (island,), httpx.AsyncClient() as http:
            body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4, "resume": resume}}
            got = await http.post(f"{island.url}/generate", json=body)
            assert (got.status_code, said in got.text) == (400, True), got.text

    go(scenario())


def test_a_request_that_is_wrong_by_itself_still_fails_at_once() -> None:
    async def scenario() -> None:
        async with live(*islands_at(3, token_s=0.0)) as (island,):
            records = [record(island.island_id, island.url)]
            async with RolloutClient(lambda: records, timeout_s=20, continuation=True) as client:
                with pytest.raises(SprawlError, match="max_new_tokens"):
                    await client.generate(request(SamplingParams(max_new_tokens=60_000)))

    go(scenario())
