"""What every engine must show, whatever it is made of. A test module subclasses `EngineConformance` and gives it a
`bench` fixture; one bench may serve all tests, each of which leaves the engine serving (closing has a test of its own
bench)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any, Protocol

import pytest

from sprawl.board.reader import Served
from sprawl.errors import SprawlError
from sprawl.rollout.engine import Engine, EngineError
from sprawl.rollout.wire import Sample, SamplingParams


class Bench(Protocol):
    """One engine with weights loaded, and the versions that can follow.

    `prompt` and `long` (new tokens that take the engine a noticeable time) fit its limits. `samples` says whether it
    draws at random, so that other seeds may give other tokens.
    """

    engine: Engine
    version: int
    prompt: list[int]
    long: int
    samples: bool

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run on the engine's event loop."""

    async def advance(self) -> tuple[Served, AbstractSet[str]]:
        """The next version and the names of what changed; `version` is its number from here on."""

    async def spoil(self) -> tuple[Served, AbstractSet[str]]:
        """A next version that the engine cannot take. `version` stays."""

    async def mend(self) -> Served:
        """The state of `version` again, after `spoil`."""


async def swap_and_resume(bench: Bench, served: Served, changed: AbstractSet[str]) -> None:
    await bench.engine.swap(served, changed)
    await bench.engine.resume()


def assert_covered(sample: Sample) -> None:
    """Spans cover all tokens, in order and without gaps, and no version goes back."""
    assert len(sample.token_ids) == len(sample.logprobs)
    edges = [0, *(span.end for span in sample.spans)]
    assert edges[-1] == len(sample.token_ids)
    assert [span.start for span in sample.spans] == edges[:-1]
    versions = [span.version for span in sample.spans]
    assert versions == sorted(set(versions))


class Seen:
    """A watch that records, and ends row 0 after `limit` tokens."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.rows: dict[int, list[tuple[int, float]]] = {}
        self.limit = limit

    def __call__(self, row: int, token: int, logprob: float) -> bool:
        self.rows.setdefault(row, []).append((token, logprob))
        return row == 0 and len(self.rows[0]) >= self.limit

    def __len__(self) -> int:
        return sum(map(len, self.rows.values()))

    async def at_least(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self) < count:
                await asyncio.sleep(0.001)


class EngineConformance:
    """Subclass it and provide `bench`."""

    def test_it_says_what_it_is(self, bench: Bench) -> None:
        limits = bench.engine.limits
        assert limits.vocab_size > max(bench.prompt)
        assert limits.max_length >= len(bench.prompt) + bench.long
        assert limits.max_batch_tokens >= limits.max_length
        assert isinstance(bench.engine.info()["kind"], str)

    def test_a_group_has_n_samples_of_one_version(self, bench: Bench) -> None:
        async def scenario() -> None:
            samples = await bench.engine.generate(bench.prompt, SamplingParams(n=3, max_new_tokens=5))
            assert len(samples) == 3
            for sample in samples:
                assert_covered(sample)
                assert [span.version for span in sample.spans] == [bench.version]
                assert all(-50.0 < logprob <= 0.0 for logprob in sample.logprobs)
                if sample.finish_reason == "length":
                    assert len(sample.token_ids) == 5

        bench.run(scenario())

    def test_the_same_request_gives_the_same_bits(self, bench: Bench) -> None:
        async def scenario() -> None:
            params = SamplingParams(n=3, max_new_tokens=6, seeds=[11, 12, 2**40])
            once = await bench.engine.generate(bench.prompt, params)
            assert await bench.engine.generate(bench.prompt, params) == once
            swapped = params.model_copy(update={"seeds": [2**40, 12, 11]})
            other = await bench.engine.generate(bench.prompt, swapped)
            assert [s.token_ids for s in other] == [s.token_ids for s in reversed(once)]
            if bench.samples:
                many = SamplingParams(n=8, max_new_tokens=6, seeds=list(range(8)))
                assert len({tuple(s.token_ids) for s in await bench.engine.generate(bench.prompt, many)}) > 1

        bench.run(scenario())

    def test_greedy_is_greedy(self, bench: Bench) -> None:
        async def scenario() -> None:
            params = SamplingParams(n=2, max_new_tokens=6, temperature=0)
            one, two = await bench.engine.generate(bench.prompt, params)
            assert one.token_ids == two.token_ids

        bench.run(scenario())

    def test_a_stop_token_ends_a_sample_and_stays_in_it(self, bench: Bench) -> None:
        async def scenario() -> None:
            params = SamplingParams(max_new_tokens=8, temperature=0)
            (whole,) = await bench.engine.generate(bench.prompt, params)
            stop = whole.token_ids[-1]
            (short,) = await bench.engine.generate(bench.prompt, params.model_copy(update={"stop_token_ids": [stop]}))
            assert short.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
            assert short.finish_reason == "stop"

        bench.run(scenario())

    def test_a_watch_sees_every_token_and_may_end_a_row(self, bench: Bench) -> None:
        async def scenario() -> None:
            seen = Seen(limit=3)
            params = SamplingParams(n=2, max_new_tokens=6, temperature=0)
            samples = await bench.engine.generate(bench.prompt, params, seen)
            for row, sample in enumerate(samples):
                assert seen.rows[row] == list(zip(sample.token_ids, sample.logprobs, strict=True))
                assert_covered(sample)
            assert len(samples[0].token_ids) <= 3
            if len(samples[0].token_ids) == 3:
                assert samples[0].finish_reason == "stop"
            assert len(samples[1].token_ids) >= len(samples[0].token_ids)

        bench.run(scenario())

    def test_a_swap_in_the_middle_shows_in_the_spans(self, bench: Bench) -> None:
        async def scenario() -> None:
            before, seen = bench.version, Seen()
            served, changed = await bench.advance()
            params = SamplingParams(n=2, max_new_tokens=bench.long, temperature=0)
            work = asyncio.ensure_future(bench.engine.generate(bench.prompt, params, seen))
            await seen.at_least(4)
            await bench.engine.pause()
            await swap_and_resume(bench, served, changed)
            samples = await work
            for sample in samples:
                assert_covered(sample)
            assert {span.version for sample in samples for span in sample.spans} == {before, bench.version}
            (after,) = await bench.engine.generate(bench.prompt, SamplingParams(max_new_tokens=4))
            assert [span.version for span in after.spans] == [bench.version]

        bench.run(scenario())

    def test_pause_freezes_between_tokens(self, bench: Bench) -> None:
        async def scenario() -> None:
            seen = Seen()
            params = SamplingParams(max_new_tokens=bench.long, temperature=0)
            work = asyncio.ensure_future(bench.engine.generate(bench.prompt, params, seen))
            await seen.at_least(2)
            await bench.engine.pause()
            await asyncio.sleep(0.05)  # what was sampled before may still be on its way
            frozen = len(seen)
            late = asyncio.ensure_future(bench.engine.generate(bench.prompt, SamplingParams(max_new_tokens=2)))
            await asyncio.sleep(0.2)
            assert len(seen) == frozen
            assert not work.done()
            assert not late.done()
            await bench.engine.resume()
            (sample,) = await work
            assert seen.rows[0] == list(zip(sample.token_ids, sample.logprobs, strict=True))
            await late

        bench.run(scenario())

    @pytest.mark.parametrize("paused", [False, True])
    def test_cancelling_stops_the_work(self, bench: Bench, paused: bool) -> None:
        async def scenario() -> None:
            seen = Seen()
            params = SamplingParams(n=2, max_new_tokens=bench.long, temperature=0)
            work = asyncio.ensure_future(bench.engine.generate(bench.prompt, params, seen))
            await seen.at_least(2)
            if paused:
                await bench.engine.pause()
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            if paused:
                await bench.engine.resume()
            stopped = len(seen)
            (sample,) = await bench.engine.generate(bench.prompt, SamplingParams(max_new_tokens=3))
            assert len(sample.token_ids) <= 3
            assert len(seen) <= stopped + 2

        bench.run(scenario())

    def test_a_swap_that_fails_leaves_the_old_version_or_nothing(self, bench: Bench) -> None:
        async def scenario() -> None:
            params = SamplingParams(max_new_tokens=6, temperature=0)
            before = await bench.engine.generate(bench.prompt, params)
            served, changed = await bench.spoil()
            await bench.engine.pause()
            with pytest.raises((EngineError, SprawlError)):
                await swap_and_resume(bench, served, changed)
            with suppress(EngineError), suppress(TimeoutError):  # it may be paused still
                async with asyncio.timeout(0.5):
                    assert await bench.engine.generate(bench.prompt, params) == before
            await bench.engine.load(await bench.mend())
            assert await bench.engine.generate(bench.prompt, params) == before

        bench.run(scenario())

    def test_close_ends_what_runs(self, closing: Bench) -> None:
        async def scenario() -> None:
            seen = Seen()
            params = SamplingParams(max_new_tokens=closing.long, temperature=0)
            work = asyncio.ensure_future(closing.engine.generate(closing.prompt, params, seen))
            await seen.at_least(1)
            await closing.engine.pause()
            await closing.engine.close()
            with pytest.raises(EngineError):
                await work
            with pytest.raises(EngineError):
                await closing.engine.generate(closing.prompt, params)
            await closing.engine.close()

        closing.run(scenario())
