"""The stream of rollouts against clients and islands in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from sprawl.board.keys import rollouts
from sprawl.board.store import MemoryStore
from sprawl.config import RunConfig
from sprawl.errors import IntegrityError, SprawlError
from sprawl.problems import Problem
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.feed import FeedState
from sprawl.rollout.trajectories import RolloutBatch, load_batch, to_bytes
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, Sample, VersionSpan
from sprawl.run.collector import Collector, SamplingJob
from sprawl.run.stream import StreamCollector, open_collector
from tests.episodes.speaking import TOKENIZER, SpeakingEngine, adds_step_by_step
from tests.episodes.test_runner import problem_set
from tests.rollout.islands import live, record
from tests.rollout.support import RUN, Stack, TinyRun, character_tokenizer, go
from tests.train.helpers import make_batch, make_config

LIMIT_S = 60.0


class Counting:
    """Problem i is the text of i. A sample is right when it is a 2."""

    name, stop = "counting", ()

    def train(self, index: int) -> Problem:
        return Problem(index, str(index), "", {})

    def heldout(self, count: int) -> list[Problem]:
        return []

    def score(self, problem: Problem, response: str) -> float:
        return float(response.startswith("2"))


class Islands:
    """A client: samples come at once, from `version`, except for prompts in `slow`, which wait to be let go. A prompt
    in `broken` fails, one in `flat` has only right samples."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[tuple[int, int]] = []  # (prompt number, lowest version that it accepts)
        self.slow: set[int] = set()
        self.broken: dict[int, Exception] = {}
        self.flat: Callable[[int], bool] = lambda number: False

    async def generate_many(self, requests: list[GenerateRequest]) -> list[GenerateResponse]:
        (request,) = requests
        number = int(TOKENIZER.decode(request.input_ids or []))
        self.asked.append((number, request.weight_version.lowest))
        version = self.version
        await asyncio.sleep(0)
        if number in self.broken:
            raise self.broken[number]
        while number in self.slow:
            await asyncio.sleep(0.001)
        count = request.sampling_params.n
        texts = ["2" if i == 0 or self.flat(number) else "3" for i in range(count)]
        samples = [
            Sample(
                token_ids=TOKENIZER.encode(text),
                logprobs=[-0.5],
                finish_reason="stop",
                spans=[VersionSpan(version=version, start=0, end=1)],
            )
            for text in texts
        ]
        return [
            GenerateResponse(samples=samples, weight_version_start=version, weight_version_end=version, island_id="i")
        ]

    async def close(self) -> None:
        pass

    def numbers(self) -> list[int]:
        return [number for number, _ in self.asked]


def stream_config(steps: int = 20, **rollout: Any) -> RunConfig:
    refill = rollout.pop("refill_rounds", 0)
    rollout = {"feed": "stream", "prompts": 2, "samples": 2, "max_staleness": 1, **rollout}
    return make_config(steps=steps, rollout=rollout, grpo={"refill_rounds": refill}, anchor={"enabled": False})


@pytest.fixture
def islands(monkeypatch: pytest.MonkeyPatch) -> Islands:
    found = Islands()

    async def opened(self: Collector) -> Islands:
        return found

    monkeypatch.setattr(Collector, "_open_client", opened)
    return found


@contextmanager
def collecting(config: RunConfig, store: MemoryStore) -> Iterator[StreamCollector]:
    collector = open_collector(SamplingJob(config, store, RUN, TOKENIZER, Counting(), [], list))
    assert isinstance(collector, StreamCollector)
    try:
        yield collector
    finally:
        collector.close()


def hurry() -> Callable[[], None]:
    """An `idle` that ends a wait that takes too long."""
    deadline = time.monotonic() + LIMIT_S

    def idle() -> None:
        assert time.monotonic() < deadline, "the trainer waits for ever"

    return idle


def step(collector: StreamCollector, islands: Islands, number: int) -> RolloutBatch:
    """Collect, train and publish."""
    batch = collector.wait(number, hurry()).batch
    islands.version = number
    collector.published(number)
    return batch


def feed(batch: RolloutBatch) -> FeedState:
    assert batch.feed is not None
    return batch.feed


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_straggler_never_blocks_and_is_used_while_it_is_fresh(islands: Islands) -> None:
    islands.slow = {0}
    with collecting(stream_config(), MemoryStore()) as collector:
        first = step(collector, islands, 1)
        assert first.groups.tolist() == [1, 1, 2, 2]
        assert feed(first).in_flight >= 1
        islands.slow = set()
        eventually(lambda: collector._pool is not None and 0 not in collector._pool._asked)
        second = step(collector, islands, 2)
        assert 0 in feed(second).prompts  # version 0 is one behind what step 2 trains
        assert second.oldest_versions.min() == 0


def test_what_is_too_old_is_given_up_and_counted(islands: Islands) -> None:
    islands.slow = {0}
    store = MemoryStore()
    with collecting(stream_config(), store) as collector:
        batches = [step(collector, islands, number) for number in range(1, 5)]
        islands.slow = set()
        eventually(lambda: collector._pool is not None and 0 not in collector._pool._asked)
        batches += [step(collector, islands, number) for number in range(5, 8)]
    trained = [number for batch in batches for number in feed(batch).prompts]
    assert len(trained) == len(set(trained))
    assert 0 not in trained
    assert sum(feed(batch).discarded for batch in batches) == 1
    for batch in batches:
        assert batch.oldest_versions.min() >= batch.step - 1 - 1
        assert load_batch(store, RUN, batch.step).feed == batch.feed  # on the board as it is here


def test_nothing_is_sampled_without_bound_whoever_is_slow(islands: Islands) -> None:
    islands.slow = set(range(100))
    with collecting(stream_config(in_flight=5), MemoryStore()) as collector:
        collector.request(1)
        eventually(lambda: len(islands.asked) == 5)
        time.sleep(0.05)
        assert islands.numbers() == [0, 1, 2, 3, 4]
        islands.slow = set()
        step(collector, islands, 1)
        time.sleep(0.05)
        assert len(islands.asked) == 5  # the trainer is slow now: three are there, and it needs two
        step(collector, islands, 2)
        eventually(lambda: len(islands.asked) == 7)
        time.sleep(0.05)
        assert len(islands.asked) == 7  # four trained, one too old by now, two for the next step


def test_without_staleness_only_the_newest_version_samples(islands: Islands) -> None:
    with collecting(stream_config(max_staleness=0), MemoryStore()) as collector:
        for number in range(1, 4):
            batch = collector.wait(number, hurry()).batch
            assert batch.oldest_versions.tolist() == [number - 1] * 2
            time.sleep(0.02)
            assert len(islands.asked) == 2 * number  # nothing while the step trains
            islands.version = number
            collector.published(number)
    assert [lowest for _, lowest in islands.asked[:6]] == [0, 0, 1, 1, 2, 2]


def test_the_last_steps_ask_for_no_more_than_they_need(islands: Islands) -> None:
    with collecting(stream_config(steps=3), MemoryStore()) as collector:
        for number in range(1, 4):
            step(collector, islands, number)
        asked = len(islands.asked)
        eventually(lambda: not collector._tasks)
        assert len(islands.asked) == asked


def test_a_resumed_stream_asks_again_for_what_was_under_way_and_trains_nothing_twice(islands: Islands) -> None:
    store = MemoryStore()
    islands.slow = {1, 4}
    with collecting(stream_config(), store) as collector:
        before = [step(collector, islands, number) for number in (1, 2)]
        third = collector.wait(3, hurry()).batch  # taken, and then the process dies
    left = feed(third)
    assert {1, 4} <= set(left.under_way)
    islands.slow, islands.asked = set(), []
    with collecting(stream_config(), store) as collector:
        again = collector.wait(3, hurry())
        assert again.reused
        assert to_bytes(again.batch) == to_bytes(third)
        eventually(lambda: len(islands.asked) >= 2)  # while step 3 trains
        islands.version = 3
        collector.published(3)
        after = [step(collector, islands, number) for number in range(4, 10)]
    assert islands.numbers()[: len(left.under_way)] == list(left.under_way)
    trained = [number for batch in [*before, third, *after] for number in feed(batch).prompts]
    assert len(trained) == len(set(trained)) == 18
    assert set(range(max(trained))) - set(trained) <= set(feed(after[-1]).under_way)  # none was passed over


def test_a_resume_between_two_steps_goes_on_from_the_batch_of_the_last_one(islands: Islands) -> None:
    store = MemoryStore()
    with collecting(stream_config(), store) as collector:
        first = step(collector, islands, 1)
    islands.asked = []
    with collecting(stream_config(), store) as collector:
        second = step(collector, islands, 2)
    assert not set(feed(first).prompts) & set(islands.numbers())
    assert islands.numbers()[0] == (*feed(first).under_way, feed(first).next_prompt)[0]
    assert second.step == 2
    store.create(rollouts(RUN, 3), to_bytes(make_batch(step=3)))
    with collecting(stream_config(), store) as collector, pytest.raises(IntegrityError, match="where the stream stood"):
        collector.wait(3, hurry())


def test_the_batch_on_the_board_is_the_batch_when_two_trainers_race(islands: Islands) -> None:
    store = MemoryStore()
    with collecting(stream_config(), store) as winner:
        theirs = winner.wait(1, hurry()).batch
    other = replace(theirs, feed=replace(feed(theirs), prompts=(7, 8), next_prompt=9, under_way=(3,)))

    class Racing(MemoryStore):
        """Somebody else's batch, or our own whose reply was lost, is there when we write ours."""

        def __init__(self, there: bytes | None) -> None:
            super().__init__()
            self.there = there

        def create(self, key: str, data: bytes) -> bool:
            if key == rollouts(RUN, 1):
                super().create(key, data if self.there is None else self.there)
                return False
            return super().create(key, data)

    islands.asked = []
    with collecting(stream_config(), Racing(to_bytes(other))) as loser:
        assert feed(step(loser, islands, 1)).prompts == (7, 8)
        assert set(feed(step(loser, islands, 2)).prompts) <= {3, 9, 10, 11}
    assert islands.numbers().count(3) == 2  # once for itself, once because the other one had it under way
    islands.version = 0
    with collecting(stream_config(), Racing(None)) as unlucky:
        mine = feed(step(unlucky, islands, 1)).prompts
        assert not set(mine) & set(feed(step(unlucky, islands, 2)).prompts)


def test_a_group_that_fails_is_repeated_and_one_that_fails_again_is_told(islands: Islands) -> None:
    islands.broken = {1: SprawlError("no island answered")}
    config = stream_config(in_flight=2)
    with collecting(config, MemoryStore()) as collector:
        with pytest.raises(SprawlError, match="no island answered"):
            collector.wait(1, hurry())
        assert islands.numbers().count(1) == 2
        islands.broken = {}
        batch = collector.wait(1, hurry()).batch  # asked again, as an orchestrator does
        assert sorted(feed(batch).prompts) == [0, 1]
        assert feed(batch).failed == 2
    islands.broken, islands.asked = {0: ValueError("a verifier that raises")}, []
    with collecting(config, MemoryStore()) as collector:
        with pytest.raises(ValueError, match="a verifier that raises"):
            collector.wait(1, hurry())
        assert islands.numbers().count(0) == 1


def test_a_failure_is_nobodys_business_while_there_are_groups_enough(islands: Islands) -> None:
    islands.broken = {0: SprawlError("no island answered")}
    with collecting(stream_config(in_flight=8), MemoryStore()) as collector:
        assert step(collector, islands, 1).samples == 4


def test_groups_without_an_advantage_are_left_out_within_the_rounds(islands: Islands) -> None:
    islands.flat = lambda number: number < 4
    with collecting(stream_config(refill_rounds=1, in_flight=2), MemoryStore()) as collector:
        first = step(collector, islands, 1)
        second = step(collector, islands, 2)
    assert feed(first).prompts == (2, 3)  # a round is two groups; what comes then fills up
    assert first.draws is not None
    assert (first.draws.groups, first.draws.reward) == (4, 1.0)
    assert min(feed(second).prompts) >= 4
    assert second.draws is None


@pytest.mark.parametrize("kind", ["generate", "episodes"])
def test_real_islands_swap_in_flight_and_every_group_is_young_enough(kind: str) -> None:
    """Sidecars on sockets that follow eagerly, a trainer that publishes after every step."""
    run = TinyRun().publish()
    config = stream_config(steps=6, max_new_tokens=16)
    if kind == "generate":
        parts = [Stack(run, FakeEngine(token_s=0.002), follow="eager") for _ in range(2)]
        problems: Any = Counting()
    else:
        parts = [Stack(run, SpeakingEngine(adds_step_by_step), follow="eager") for _ in range(2)]
        problems = problem_set()

    async def scenario() -> list[RolloutBatch]:
        async with live(*parts) as started:
            records = [record(island.island_id, island.url, heartbeat_at=time.time() + 60) for island in started]
            collector = open_collector(
                SamplingJob(config, run.store, RUN, character_tokenizer(), problems, [], lambda: records)
            )
            try:
                batches = []
                for number in range(1, 7):
                    batches.append((await asyncio.to_thread(collector.wait, number, hurry())).batch)
                    run.publish()
                    collector.published(number)
                return batches
            finally:
                await asyncio.to_thread(collector.close)

    batches = go(scenario(), 120)
    for batch in batches:
        assert int(batch.oldest_versions.min()) >= batch.step - 2
        assert int(batch.version_end.max()) < batch.step
    numbers = [number for batch in batches for number in feed(batch).prompts]
    assert len(numbers) == len(set(numbers)) == 12
    assert int(batches[-1].oldest_versions.max()) > 0  # the islands came along
    if kind == "episodes":
        assert batches[-1].turns is not None
        assert batches[-1].turns.tolist() == [3] * 4
