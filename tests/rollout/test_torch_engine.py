"""The embedded engine on a tiny random model: reproducible whatever else runs, and honest about swaps."""

from __future__ import annotations

import asyncio

import pytest
import torch

from sprawl.board.reader import Served
from sprawl.policy import Architecture, Decoder
from sprawl.rollout.engine import EngineError
from sprawl.rollout.torch_engine import TorchEngine
from sprawl.rollout.wire import SamplingParams
from tests.rollout.support import go, until

ARCH = Architecture.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
)


def served(version: int, broken: bool = False) -> Served:
    """Random weights, another set for every version."""
    generator = torch.Generator().manual_seed(version)
    state = {
        name: (torch.randn(parameter.shape, generator=generator) * 0.3).bfloat16()
        for name, parameter in Decoder(ARCH).state_dict().items()
    }
    if broken:
        state["model.norm.weight"][0] = float("nan")
    return Served(version, state, {}, "")


async def engine_at(version: int, **options) -> TorchEngine:
    engine = TorchEngine(Decoder(ARCH), **options)
    await engine.load(served(version))
    return engine


def count(seen: list[int]) -> bool:
    seen.append(1)
    return False


async def swap(engine: TorchEngine, version: int) -> None:
    await engine.pause()
    await engine.swap(served(version), {"model.norm.weight"})
    await engine.resume()


def reference(version: int, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probs of `tokens` after `prompt` from one uncached forward pass."""
    decoder = Decoder(ARCH).eval()
    decoder.load_served(served(version).state, torch.float32)
    with torch.no_grad():
        logits = decoder(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)


def test_the_same_request_gives_the_same_bits_whatever_else_runs() -> None:
    async def scenario() -> None:
        params = SamplingParams(n=4, max_new_tokens=12, temperature=1.0, seeds=[1, 2, 3, 4])
        first, second = await engine_at(1, eos_ids=[0]), await engine_at(1, eos_ids=[0])
        alone = await first.generate([5, 6, 7], params)
        noise = [second.generate([9] * (i + 1), SamplingParams(n=i + 1, max_new_tokens=5)) for i in range(6)]
        crowded = await asyncio.gather(*noise[:3], second.generate([5, 6, 7], params), *noise[3:])
        assert crowded[3] == alone
        assert len({tuple(sample.token_ids) for sample in alone}) > 1
        other = await first.generate([5, 6, 7], params.model_copy(update={"seeds": [5, 6, 7, 8]}))
        assert other != alone
        await first.close()
        await second.close()

    go(scenario())


def test_logprobs_are_those_of_an_uncached_forward_pass() -> None:
    async def scenario() -> None:
        engine = await engine_at(3)
        samples = await engine.generate([5, 6], SamplingParams(n=3, max_new_tokens=10))
        for sample in samples:
            expected = reference(3, [5, 6], sample.token_ids)
            assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=1e-5)
            assert sample.finish_reason == "length"
        await engine.close()

    go(scenario())


def test_a_row_ends_at_its_stop_token_and_keeps_it() -> None:
    async def scenario() -> None:
        engine = await engine_at(2, eos_ids=[11])
        free = SamplingParams(n=8, max_new_tokens=30, seeds=list(range(8)))
        whole = await (await engine_at(2)).generate([5], free)
        stopped = await engine.generate([5], free.model_copy(update={"stop_token_ids": [12, 13]}))
        ended = 0
        for long, short in zip(whole, stopped, strict=True):
            ends = [i for i, token in enumerate(long.token_ids) if token in (11, 12, 13)]
            assert short.token_ids == long.token_ids[: ends[0] + 1 if ends else 30]
            assert short.finish_reason == ("stop" if ends else "length")
            ended += bool(ends)
        assert ended
        await engine.close()

    go(scenario())


def test_a_swap_in_the_middle_recomputes_the_prefix_and_shows_in_the_spans() -> None:
    async def scenario() -> None:
        engine = await engine_at(1)
        seen = 0

        def watch(row: int, token: int, logprob: float) -> bool:
            nonlocal seen
            seen += 1
            return False

        work = asyncio.ensure_future(engine.generate([5, 6], SamplingParams(n=2, max_new_tokens=200), watch))
        await until(lambda: seen >= 20)
        await swap(engine, 2)
        samples = await work
        for sample in samples:
            first, second = sample.spans
            assert (first.version, second.version) == (1, 2)
            assert (first.start, first.end, second.end) == (0, second.start, 200)
            head, tail = sample.token_ids[: first.end], sample.token_ids[second.start :]
            old = reference(1, [5, 6], head)
            new = reference(2, [5, 6, *head], tail)
            assert torch.allclose(torch.tensor(sample.logprobs), torch.cat((old, new)), atol=1e-4)
        assert engine.info()["recomputed_caches"] == 1
        await engine.close()

    go(scenario())


def test_pause_freezes_between_tokens_and_swap_needs_it() -> None:
    async def scenario() -> None:
        engine = await engine_at(1)
        seen: list[int] = []
        work = asyncio.ensure_future(
            engine.generate([5], SamplingParams(max_new_tokens=200), lambda row, token, logprob: count(seen))
        )
        await until(lambda: len(seen) > 3)
        with pytest.raises(RuntimeError):
            await engine.swap(served(2), {"x"})
        await engine.pause()
        frozen = len(seen)
        await asyncio.sleep(0.05)
        assert len(seen) == frozen
        await engine.resume()
        assert len((await work)[0].token_ids) == 200
        await engine.close()

    go(scenario())


def test_cancelling_stops_the_work_even_while_paused() -> None:
    async def scenario() -> None:
        engine = await engine_at(1)
        seen: list[int] = []
        work = asyncio.ensure_future(
            engine.generate([5], SamplingParams(max_new_tokens=250), lambda row, token, logprob: count(seen))
        )
        queued = asyncio.ensure_future(engine.generate([6], SamplingParams(max_new_tokens=250)))
        await until(lambda: len(seen) > 3)
        await engine.pause()
        for task in (work, queued):
            task.cancel()
        await asyncio.gather(work, queued, return_exceptions=True)
        await engine.resume()
        await engine.generate([7], SamplingParams(max_new_tokens=2))
        assert engine.info()["groups"] == 1
        assert len(seen) < 250
        await engine.close()

    go(scenario())


def test_close_ends_what_is_in_flight() -> None:
    async def scenario() -> None:
        engine = await engine_at(1)
        await engine.pause()
        tasks = [asyncio.ensure_future(engine.generate([5], SamplingParams(max_new_tokens=9))) for _ in range(3)]
        await asyncio.sleep(0.02)
        await engine.close()
        assert all(isinstance(e, EngineError) for e in await asyncio.gather(*tasks, return_exceptions=True))
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([5], SamplingParams())
        await engine.close()

    go(scenario())


def test_broken_weights_fail_the_request_and_name_the_version() -> None:
    async def scenario() -> None:
        engine = TorchEngine(Decoder(ARCH))
        with pytest.raises(EngineError, match="no weights"):
            await engine.generate([5], SamplingParams())
        await engine.load(served(4, broken=True))
        with pytest.raises(EngineError, match="version 4 produced non-finite"):
            await engine.generate([5], SamplingParams())
        await engine.close()

    go(scenario())


def test_a_served_state_that_is_patched_later_does_not_reach_the_engine() -> None:
    async def scenario() -> None:
        engine, state = TorchEngine(Decoder(ARCH), compute_dtype="bfloat16"), served(1)
        await engine.load(state)
        greedy = SamplingParams(max_new_tokens=8, temperature=0)
        before = await engine.generate([5], greedy)
        for tensor in state.state.values():
            tensor.zero_()
        assert await engine.generate([5], greedy) == before
        await engine.close()

    go(scenario())
