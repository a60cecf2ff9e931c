"""Who is asked, how often, and what happens to the slow and the crowded ones."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import httpx
import pytest

from sprawl.board.records import IslandRecord
from sprawl.errors import SprawlError
from sprawl.rollout.client import RolloutClient, listed
from sprawl.rollout.client.hedging import ENOUGH, Latencies, within_budget
from sprawl.rollout.client.islands import FIRST_COOLDOWN_S, MAX_COOLDOWN_S, Island, jittered, least_loaded
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.wire import GenerateResponse, Sample, SamplingParams, VersionSpan
from tests.rollout.islands import live, record, request, stacks
from tests.rollout.support import go, until

LONG = SamplingParams(max_new_tokens=4000)


def answer(island: str) -> httpx.Response:
    sample = Sample(token_ids=[1], logprobs=[0.0], finish_reason="stop", spans=[VersionSpan(version=0, start=0, end=1)])
    body = GenerateResponse(samples=[sample] * 2, weight_version_start=0, weight_version_end=0, island_id=island)
    return httpx.Response(200, content=body.model_dump_json())


def test_what_others_ask_of_an_island_counts_as_its_load() -> None:
    async def scenario() -> None:
        async with live(*stacks(2, token_s=0.005)) as islands:

            def discover() -> list[IslandRecord]:
                return [record(i.island_id, i.url) for i in islands]

            async with RolloutClient(lambda: discover()[:1], timeout_s=30) as other:
                crowd = [asyncio.ensure_future(other.generate(request(LONG))) for _ in range(2)]
                await until(lambda: islands[0].stack.gate.active == 2)
                async with RolloutClient(discover, timeout_s=30) as client:
                    await client._directory.refresh()
                    await until(lambda: client._directory.known["island-0"].others == 2)
                    answers = [await client.generate(request()) for _ in range(4)]
                assert {one.island_id for one in answers} == {"island-1"}
                for task in crowd:
                    task.cancel()
                await asyncio.gather(*crowd, return_exceptions=True)

    go(scenario())


def test_the_island_that_failed_a_group_is_asked_last() -> None:
    a, b, c = (Island(record(name, f"http://{name}"), 2.0) for name in "abc")
    b.load, c.load = 1, 1
    assert least_loaded([a, b, c], 0.0, {}) is a
    assert least_loaded([a, b], 0.0, {a.life: 1}) is b
    assert least_loaded([a, b], 0.0, {}, prefer="b") is b
    a.rested_at = 5.0
    assert least_loaded([a, b], 1.0, {b.life: 3}) is b
    b.load = 2
    assert least_loaded([a, b], 1.0, {}) is None


def test_backing_off_is_random_longer_with_every_failure_and_bounded() -> None:
    random.seed(3)
    for failures in (1, 2, 3, 5, 60):
        bound = min(MAX_COOLDOWN_S, FIRST_COOLDOWN_S * 2 ** (failures - 1))
        pauses = [jittered(failures) for _ in range(200)]
        assert bound / 2 <= min(pauses) < max(pauses) <= bound
        assert len(set(pauses)) > 150


def test_a_straggler_is_asked_for_again_elsewhere_and_the_loser_is_cancelled() -> None:
    async def scenario() -> None:
        async with live(*stacks(2, token_s=0.001)) as islands:
            records = [record(i.island_id, i.url) for i in islands]
            async with RolloutClient(lambda: records, timeout_s=30, concurrency_per_island=1) as client:
                await client.generate_many([request() for _ in range(2 * ENOUGH)])
                assert client.metrics.hedges == 0 or client.metrics.hedges == client.metrics.losers_cancelled
                before = client.metrics.snapshot()
                slow = islands[0].stack.engine
                assert isinstance(slow, FakeEngine)
                slow._token_s = 8.0  # it stalls, and its heartbeat goes on
                client._directory.known["island-1"].order = 2.0  # the slow one is asked first
                client._directory.known["island-1"].failures = 1
                began = time.monotonic()
                got = await client.generate(request())
                assert time.monotonic() - began < 5
                assert got.island_id == "island-1"
                after = client.metrics.snapshot()
                gained = {name: after[name] - before[name] for name in ("hedges", "hedges_won", "losers_cancelled")}
                assert gained == {"hedges": 1, "hedges_won": 1, "losers_cancelled": 1}
                await until(lambda: slow.cancelled == 1 and islands[0].stack.gate.active == 0)

    go(scenario())


def test_the_first_of_two_may_still_win() -> None:
    async def scenario() -> None:
        async with live(*stacks(2, token_s=0.001)) as islands:
            records = [record(i.island_id, i.url) for i in islands]
            async with RolloutClient(lambda: records, timeout_s=30, concurrency_per_island=1) as client:
                await client.generate_many([request() for _ in range(2 * ENOUGH)])
                won = client.metrics.hedges_won
                client._directory.known["island-1"].failures = 1
                for island, token_s in zip(islands, (0.1, 8.0), strict=True):
                    assert isinstance(island.stack.engine, FakeEngine)
                    island.stack.engine._token_s = token_s
                assert (await client.generate(request())).island_id == "island-0"
                assert client.metrics.hedges_won == won
                assert client.metrics.hedges >= 1

    go(scenario())


def test_hedging_waits_for_evidence_and_keeps_a_budget() -> None:
    seen = Latencies(0.95)
    for number in range(ENOUGH):
        assert seen.patience(100) is None
        seen.add(100, 1.0 + number)
    assert seen.patience(100) == ENOUGH
    assert seen.patience(5000) is None  # other sizes take other times
    assert within_budget(0, 0)
    assert not within_budget(1, 0)
    assert within_budget(5, 50)
    assert not within_budget(6, 50)


def test_a_whole_fleet_that_is_slow_is_not_asked_for_twice_the_work() -> None:
    async def scenario() -> None:
        async with live(*stacks(3, token_s=0.001)) as islands:
            records = [record(i.island_id, i.url) for i in islands]
            async with RolloutClient(lambda: records, timeout_s=30, concurrency_per_island=1) as client:
                await client.generate_many([request() for _ in range(20)])
                for island in islands:
                    assert isinstance(island.stack.engine, FakeEngine)
                    island.stack.engine._token_s = 0.05
                await client.generate_many([request() for _ in range(12)])
                assert client.metrics.groups == 32
                assert client.metrics.hedges <= 1 + 0.1 * 32

    go(scenario())


def test_a_crowded_island_gets_less_and_is_left_alone_as_long_as_it_asks() -> None:
    async def scenario() -> None:
        active, peak, refused = 0, 0, []

        async def handle(posted: httpx.Request) -> httpx.Response:
            nonlocal active, peak
            if posted.method == "GET":
                return httpx.Response(404)
            if active >= 2:
                refused.append(time.monotonic())
                body = {"error": {"type": "EngineUnavailable", "message": "2 requests are already held here"}}
                return httpx.Response(503, json=body, headers={"Retry-After": "0.4"})
            active += 1
            peak = max(peak, active)
            try:
                if refused:
                    assert time.monotonic() - refused[-1] >= 0.38
                await asyncio.sleep(0.02)
            finally:
                active -= 1
            return answer("a")

        transport = httpx.MockTransport(handle)
        async with RolloutClient(
            lambda: [record("a", "http://a")], timeout_s=20, concurrency_per_island=8, transport=transport
        ) as client:
            answers = await client.generate_many([request() for _ in range(40)])
            assert len(answers) == 40
            assert client.metrics.islands_slowed >= 1
            assert client.metrics.failures["unavailable"] == len(refused) < 40
            assert peak <= 2

    go(scenario())


def test_one_group_that_wants_too_much_holds_up_no_other() -> None:
    async def scenario() -> None:
        async with live(*stacks(1, versions=1, max_wait_s=0.02)) as (island,):
            records = [record(island.island_id, island.url)]
            async with RolloutClient(lambda: records, timeout_s=20) as client:
                early = asyncio.ensure_future(client.generate(request(min_version=1)))
                await until(lambda: client.metrics.failures["behind"] >= 2)
                began = time.monotonic()
                for _ in range(5):
                    await client.generate(request())
                assert time.monotonic() - began < 2
                island.stack.run.publish()
                assert (await early).weight_version_start == 1

    go(scenario())


def test_islands_from_a_list() -> None:
    async def scenario() -> None:
        async with live(*stacks(2)) as islands:
            urls = [islands[0].url, "http://127.0.0.1:9", islands[1].url]
            async with RolloutClient(listed(urls), timeout_s=20) as client:
                answers = await client.generate_many([request() for _ in range(8)])
            assert Counter(one.island_id for one in answers).keys() == {"island-0", "island-1"}
            async with RolloutClient(listed(urls[1:2]), timeout_s=0.3) as client:
                with pytest.raises(SprawlError, match=r"127\.0\.0\.1:9 .*lost"):
                    await client.generate(request())

    go(scenario())
    for wrong, said in ((["127.0.0.1:80"], "no URL of a sidecar"), ([], "is empty")):
        with pytest.raises(SprawlError, match=said):
            listed(wrong)


def test_metrics_are_prometheus_text_and_a_dictionary() -> None:
    async def scenario() -> str:
        async with live(*stacks(1)) as (island,):
            records = [record('east"1', island.url)]
            async with RolloutClient(lambda: records, timeout_s=20) as client:
                await client.generate_many([request() for _ in range(3)])
                snapshot = client.metrics.snapshot()
                assert (snapshot["groups"], snapshot["attempts"], snapshot["in_flight"]) == (3, 3, 0)
                client.metrics.failures["lie"] += 1
                assert client.metrics.snapshot()["failures_lie"] == 1
                return client.metrics.render()

    text = go(scenario())
    assert "sprawl_client_groups_total 3" in text.splitlines()
    assert r'sprawl_client_answers_by_island_total{island="east\"1"} 3' in text.splitlines()
    assert 'sprawl_client_failures_total{reason="lie"} 1' in text.splitlines()
