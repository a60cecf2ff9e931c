"""Continuous batching in the embedded engine: who waits, who joins, who fails, and always the same bits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sprawl.board.reader import Served
from sprawl.errors import SprawlError
from sprawl.policy import Architecture, Decoder
from sprawl.rollout.batching.pages import PAGE, page_bytes
from sprawl.rollout.engine import EngineError
from sprawl.rollout.torch_engine import TorchEngine
from sprawl.rollout.wire import Sample, SamplingParams
from tests.rollout.support import go, until
from tests.rollout.test_torch_engine import ARCH, served, swap

UNTIED = Architecture.from_hf(
    {
        "model_type": "qwen3",
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
)
REQUEST = st.tuples(
    st.lists(st.integers(1, 39), min_size=1, max_size=50),  # prompt
    st.integers(1, 6),  # samples
    st.integers(1, 20),  # new tokens
    st.sampled_from([0.0, 0.7, 1.0]),
    st.integers(0, 2**40),  # first seed
    st.integers(0, 12),  # tokens of the first request that it lets pass before it comes
)


def params_of(request: Any) -> tuple[list[int], SamplingParams]:
    prompt, n, new_tokens, temperature, seed, _ = request
    seeds = [seed + i for i in range(n)]
    return prompt, SamplingParams(n=n, max_new_tokens=new_tokens, temperature=temperature, seeds=seeds)


async def at(arch: Architecture = ARCH, **options: Any) -> TorchEngine:
    engine = TorchEngine(Decoder(arch), **options)
    await engine.load(served(1))
    return engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(st.lists(REQUEST, min_size=1, max_size=6), st.sampled_from([12, 40, 400]))
@settings(max_examples=25, deadline=None)
def test_the_same_request_gives_the_same_bits_in_any_company(dtype: str, requests: list[Any], pages: int) -> None:
    """One after another, and all at once at staggered times in caches that make them wait."""

    async def scenario() -> None:
        calm = await at(compute_dtype=dtype, eos_ids=[0])
        alone = [await calm.generate(*params_of(request)) for request in requests]
        await calm.close()
        busy = await at(compute_dtype=dtype, eos_ids=[0], cache_bytes=pages * page_bytes(ARCH))
        seen = 0

        def count(row: int, token: int, logprob: float) -> bool:
            nonlocal seen
            seen += 1
            return False

        async def come(request: Any) -> list[Sample]:
            for _ in range(50):
                if seen >= request[-1]:
                    break
                await asyncio.sleep(0.0005)
            return await busy.generate(*params_of(request), count)

        assert await asyncio.gather(*map(come, requests)) == alone
        assert busy.info()["cache_pages_free"] == pages
        await busy.close()

    go(scenario())


def test_a_sample_goes_on_from_its_own_tokens_with_the_same_log_probs() -> None:
    """A prompt that ends in sampled tokens is read in blocks; the logits are those of going token by token."""

    async def scenario() -> None:
        engine = await at()
        prompt = [5, 6, 7]
        (whole,) = await engine.generate(prompt, SamplingParams(max_new_tokens=40, temperature=0))
        for cut in (1, PAGE - 3, PAGE, 33):
            (rest,) = await engine.generate(
                prompt + whole.token_ids[:cut], SamplingParams(max_new_tokens=40 - cut, temperature=0)
            )
            assert rest.token_ids == whole.token_ids[cut:]
            assert rest.logprobs == whole.logprobs[cut:]
        await engine.close()

    go(scenario())


def test_a_swap_gives_what_a_request_with_the_tokens_so_far_would_get() -> None:
    async def scenario() -> None:
        engine, fresh = await at(), TorchEngine(Decoder(ARCH))
        await fresh.load(served(2))
        seen: list[int] = []
        work = asyncio.ensure_future(
            engine.generate([5, 6], SamplingParams(max_new_tokens=120, temperature=0), lambda *_: bool(seen.append(1)))
        )
        other = asyncio.ensure_future(engine.generate([9] * 30, SamplingParams(n=3, max_new_tokens=100)))
        await until(lambda: len(seen) > 20)
        await swap(engine, 2)
        (sample,) = await work
        await other
        first, second = sample.spans
        (expected,) = await fresh.generate(
            [5, 6, *sample.token_ids[: first.end]], SamplingParams(max_new_tokens=120 - first.end, temperature=0)
        )
        assert sample.token_ids[second.start :] == expected.token_ids
        assert sample.logprobs[second.start :] == expected.logprobs
        assert engine.info()["recomputed_caches"] == 2
        await engine.close()
        await fresh.close()

    go(scenario())


def test_requests_run_together() -> None:
    """A short request that comes later ends long before the long one."""

    async def scenario() -> None:
        engine = await at()
        seen: list[int] = []
        long = asyncio.ensure_future(
            engine.generate([5], SamplingParams(n=4, max_new_tokens=250), lambda *_: bool(seen.append(1)))
        )
        await until(lambda: len(seen) > 8)
        await engine.generate([6], SamplingParams(n=4, max_new_tokens=3))
        assert not long.done()
        assert len(seen) < 4 * 100
        await long
        await engine.close()

    go(scenario())


def test_samples_wait_for_pages_and_the_cache_is_never_exceeded() -> None:
    async def scenario() -> None:
        pages = 6
        engine = await at(cache_bytes=pages * page_bytes(ARCH))
        assert engine.limits.max_length == (pages - 2) * PAGE
        most = 0

        def watch(row: int, token: int, logprob: float) -> bool:
            nonlocal most
            most = max(most, engine.info()["running_samples"])
            return False

        groups = [engine.generate([7] * 20, SamplingParams(n=9, max_new_tokens=8), watch) for _ in range(3)]
        samples = await asyncio.gather(*groups)
        assert all(len(sample.token_ids) == 8 for group in samples for sample in group)
        assert 0 < most <= pages
        with pytest.raises(EngineError, match="do not fit"):
            await engine.generate([7] * 60, SamplingParams(max_new_tokens=5))
        assert engine.info()["cache_pages_free"] == pages
        await engine.close()

    go(scenario())


def test_a_cache_that_holds_nothing_is_refused() -> None:
    with pytest.raises(SprawlError, match=f"give it {3 * page_bytes(ARCH)} bytes"):
        TorchEngine(Decoder(ARCH), cache_bytes=2 * page_bytes(ARCH))


def test_logits_that_are_no_numbers_fail_the_request_that_has_them() -> None:
    """One token's embedding is broken: who uses it fails, who shares a block with them does not notice."""

    async def scenario() -> None:
        generator = torch.Generator().manual_seed(1)
        state = {
            name: (torch.randn(parameter.shape, generator=generator) * 0.3).bfloat16()
            for name, parameter in Decoder(UNTIED).named_parameters()
        }
        engine = TorchEngine(Decoder(UNTIED))
        params = SamplingParams(n=3, max_new_tokens=20, temperature=0)
        await engine.load(Served(1, state, {}, ""))
        alone = await engine.generate([5, 6], params)
        state["model.embed_tokens.weight"][39] = float("nan")
        assert all(39 not in sample.token_ids for sample in alone)
        await engine.load(Served(1, state, {}, ""))
        good, bad, again = await asyncio.gather(
            engine.generate([5, 6], params),
            engine.generate([39], params),
            engine.generate([5, 6], params),
            return_exceptions=True,
        )
        assert good == again == alone
        assert isinstance(bad, EngineError)
        assert "non-finite" in str(bad)
        assert engine.info()["cache_pages_free"] == engine.info()["cache_pages"]
        await engine.close()

    go(scenario())


def test_a_watch_that_raises_ends_its_request_alone() -> None:
    async def scenario() -> None:
        engine = await at()

        def broken(row: int, token: int, logprob: float) -> bool:
            raise ValueError("no")

        good, bad = await asyncio.gather(
            engine.generate([5], SamplingParams(n=2, max_new_tokens=9)),
            engine.generate([5], SamplingParams(n=2, max_new_tokens=9), broken),
            return_exceptions=True,
        )
        assert not isinstance(good, BaseException)
        assert isinstance(bad, EngineError)
        await engine.close()

    go(scenario())


def test_a_cancelled_request_gives_its_pages_back() -> None:
    async def scenario() -> None:
        engine = await at(cache_bytes=20 * page_bytes(ARCH))
        seen: list[int] = []
        work = asyncio.ensure_future(
            engine.generate([5], SamplingParams(max_new_tokens=250), lambda *_: bool(seen.append(1)))
        )
        await until(lambda: len(seen) > 3)
        waiting = asyncio.ensure_future(engine.generate([6], SamplingParams(max_new_tokens=250)))
        await asyncio.sleep(0.01)
        work.cancel()
        (sample,) = await waiting
        assert len(sample.token_ids) == 250
        await engine.close()

    go(scenario())
