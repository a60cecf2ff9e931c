"""The client over real sockets: no group is lost, no wrong version is accepted, every give-up is explained."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter

import httpx
import pytest

from sprawl.board.records import IslandRecord
from sprawl.errors import BoardError, SprawlError
from sprawl.rollout.client import RolloutClient
from sprawl.rollout.wire import (
    GenerateResponse,
    NotReady,
    Sample,
    SamplingParams,
    VersionSpan,
)
from tests.rollout.islands import live, record, request, stacks
from tests.rollout.support import Stack, TinyRun, go, until


def test_groups_come_back_in_order_and_are_spread() -> None:
    async def scenario() -> None:
        async with live(*stacks(2, versions=3, token_s=0.002)) as islands:
            records = [record(i.island_id, i.url) for i in islands]
            async with RolloutClient(lambda: records, timeout_s=10) as client:
                requests = [request(SamplingParams(max_new_tokens=1 + i % 4)) for i in range(24)]
                answers = await client.generate_many(requests)
            assert [len(answer.samples[0].token_ids) for answer in answers] == [1 + i % 4 for i in range(24)]
            shares = Counter(answer.island_id for answer in answers)
            assert min(shares["island-0"], shares["island-1"]) >= 6
            assert all(i.stack.gate.active == 0 for i in islands)

    go(scenario())


def test_an_island_that_dies_in_the_middle_costs_no_group() -> None:
    async def scenario() -> None:
        async with live(*stacks(2, token_s=0.01)) as islands:
            records = [record(i.island_id, i.url) for i in islands]
            async with RolloutClient(lambda: records, timeout_s=20) as client:
                groups = [asyncio.ensure_future(client.generate(request())) for _ in range(12)]
                await until(lambda: islands[0].stack.gate.active == 2)
                islands[0].die()
                answers = await asyncio.gather(*groups)
            assert len(answers) == 12
            assert Counter(answer.island_id for answer in answers)["island-1"] >= 10

    go(scenario())


def test_a_machine_that_vanishes_without_a_word_is_given_up_with_its_heartbeat() -> None:
    async def scenario() -> None:
        silent = socket.create_server(("127.0.0.1", 0))  # accepts, never answers
        async with live(*stacks(1)) as (island,):
            gone = record("a-silent", f"http://127.0.0.1:{silent.getsockname()[1]}", interval_s=0.3)
            records = [gone, record(island.island_id, island.url)]
            async with RolloutClient(lambda: records, timeout_s=30) as client:
                answer = await client.generate(request())
            assert answer.island_id == "island-0"
        silent.close()

    go(scenario())


def test_a_new_island_is_found_while_waiting() -> None:
    async def scenario() -> None:
        records: list[IslandRecord] = []
        async with live(*stacks(1)) as (island,), RolloutClient(lambda: records, timeout_s=20) as client:
            work = asyncio.ensure_future(client.generate(request()))
            await asyncio.sleep(0.1)
            records.append(record(island.island_id, island.url))
            assert (await work).island_id == "island-0"

    go(scenario())


def test_passed_here_is_asked_there_and_passed_everywhere_is_an_error() -> None:
    async def scenario() -> None:
        async with live(*stacks(2, versions=3)) as islands:
            records = [record(i.island_id, i.url) for i in islands]
            async with RolloutClient(lambda: records[:1], timeout_s=10) as client:
                await client.generate(request(exact_version=2))
                with pytest.raises(SprawlError, match="already passed"):
                    await client.generate(request(exact_version=1))
            async with RolloutClient(lambda: records, timeout_s=10) as client:
                answer = await client.generate(request(exact_version=1))
                assert (answer.island_id, answer.weight_version_end) == ("island-1", 1)

    go(scenario())


def test_behind_is_retried_until_the_deadline_which_names_every_island() -> None:
    async def scenario() -> None:
        run = TinyRun().publish(1)
        async with live(Stack(run, max_wait_s=0.05)) as (island,):
            records = [record(island.island_id, island.url)]
            async with RolloutClient(lambda: records, timeout_s=20) as client:
                work = asyncio.ensure_future(client.generate(request(min_version=1)))
                await asyncio.sleep(0.3)
                run.publish()
                assert (await work).weight_version_start == 1
            async with RolloutClient(lambda: records, timeout_s=0.5) as client:
                with pytest.raises(SprawlError) as caught:
                    await client.generate(request(min_version=9))
            for part in ("within 0.5 s", "island-0", island.url, "version 9 did not arrive"):
                assert part in str(caught.value)

    go(scenario())


def test_without_islands_the_error_says_why() -> None:
    def unreachable() -> list[IslandRecord]:
        raise BoardError("board s3://x is unreachable")

    async def scenario() -> None:
        for discover, said in (
            (list, "no island is registered"),
            (unreachable, "board s3://x is unreachable"),
            (lambda: [record("old", "http://127.0.0.1:9", heartbeat_at=1.0)], "old http://127.0.0.1:9 (lost"),
            (lambda: [record("new", "http://127.0.0.1:9", state="starting")], "(starting"),
        ):
            async with RolloutClient(discover, timeout_s=0.2) as client:
                with pytest.raises(SprawlError) as caught:
                    await client.generate(request())
                assert said in str(caught.value)

    go(scenario())


def test_a_request_that_no_island_could_serve_fails_at_once() -> None:
    async def scenario() -> None:
        async with live(*stacks(1), token="sesame") as (island,):
            records = [record(island.island_id, island.url)]
            async with RolloutClient(lambda: records, timeout_s=20, token="sesame") as client:
                started = time.monotonic()
                with pytest.raises(SprawlError, match="max_new_tokens"):
                    await client.generate(request(SamplingParams(max_new_tokens=60_000)))
                assert (await client.generate(request())).island_id == "island-0"
            async with RolloutClient(lambda: records, timeout_s=20, token="wrong") as client:
                with pytest.raises(SprawlError, match="SPRAWL_TOKEN"):
                    await client.generate(request())
            assert time.monotonic() - started < 10

    go(scenario())


def test_queueing_behind_ones_own_groups_does_not_count_as_waiting() -> None:
    async def scenario() -> None:
        async with live(*stacks(1, token_s=0.03)) as (island,):
            records = [record(island.island_id, island.url)]
            async with RolloutClient(lambda: records, timeout_s=0.6, concurrency_per_island=1) as client:
                assert len(await client.generate_many([request() for _ in range(8)])) == 8

    go(scenario())


SPAN = VersionSpan(version=3, start=0, end=2)
GOOD = Sample(token_ids=[1, 2], logprobs=[0.0, 0.0], finish_reason="stop", spans=[SPAN])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([GOOD], "1 samples instead of 2"),
        ([GOOD, GOOD.model_copy(update={"spans": [SPAN.model_copy(update={"version": 4})]})], "version 4"),
        ([GOOD, GOOD.model_copy(update={"spans": [SPAN.model_copy(update={"end": 1})]})], "do not cover"),
        ([GOOD, GOOD.model_copy(update={"logprobs": [0.0]})], "do not cover"),
        ([GOOD, GOOD.model_copy(update={"finish_reason": "abort"})], "broken off"),
        ([GOOD, GOOD.model_copy(update={"finish_reason": "length"})], "says it reached 5"),
        ([GOOD, GOOD.model_copy(update={"logprobs": [0.0, float("nan")]})], "valid number"),
        ([GOOD, GOOD.model_copy(update={"logprobs": [0.0, 0.5]})], "log-probs"),
        ([GOOD, Sample(token_ids=[], logprobs=[], finish_reason="stop", spans=[])], "broken off"),
    ],
)
def test_an_answer_that_breaks_its_promise_is_not_accepted(wrong: list[Sample], said: str) -> None:
    def answer(samples: list[Sample], island_id: str) -> httpx.Response:
        body = GenerateResponse(samples=samples, weight_version_start=3, weight_version_end=3, island_id=island_id)
        return httpx.Response(200, content=body.model_dump_json())

    async def scenario(honest: bool) -> GenerateResponse:
        def handle(posted: httpx.Request) -> httpx.Response:
            name = posted.url.host
            return answer([GOOD, GOOD] if name == "b" else wrong, name)

        records = [record("a", "http://a"), *([record("b", "http://b")] if honest else [])]
        transport = httpx.MockTransport(handle)
        async with RolloutClient(lambda: records, timeout_s=1, transport=transport) as client:
            return await client.generate(request(exact_version=3))

    assert go(scenario(honest=True)).island_id == "b"
    with pytest.raises(SprawlError) as caught:
        go(scenario(honest=False))
    assert said in str(caught.value)


def test_a_draining_island_is_not_asked_again() -> None:
    async def scenario() -> None:
        asked: Counter[str] = Counter()

        def handle(posted: httpx.Request) -> httpx.Response:
            if posted.method == "GET":
                return httpx.Response(404)
            asked[posted.url.host] += 1
            if posted.url.host == "a":
                records[0] = record("a", "http://a", state="draining")
                return httpx.Response(503, json={"error": {"type": "EngineUnavailable", "message": "draining"}})
            body = GenerateResponse(samples=[GOOD, GOOD], weight_version_start=3, weight_version_end=3, island_id="b")
            return httpx.Response(200, content=body.model_dump_json())

        records = [record("a", "http://a"), record("b", "http://b")]
        async with RolloutClient(lambda: records, timeout_s=5, transport=httpx.MockTransport(handle)) as client:
            for _ in range(4):
                assert (await client.generate(request())).island_id == "b"
        assert asked["a"] == 1

    go(scenario())


def test_a_409_without_a_meaning_is_retried_elsewhere() -> None:
    async def scenario() -> None:
        def handle(posted: httpx.Request) -> httpx.Response:
            if posted.url.host == "a":
                return httpx.Response(409, text="conflict")
            refusal = NotReady(target_version=1, applied=3, message="already passed", retryable=False)
            return httpx.Response(409, json=refusal.model_dump())

        records = [record("a", "http://a"), record("b", "http://b")]
        async with RolloutClient(lambda: records, timeout_s=0.6, transport=httpx.MockTransport(handle)) as client:
            with pytest.raises(SprawlError, match="an unreadable 409"):
                await client.generate(request(exact_version=1))

    go(scenario())
