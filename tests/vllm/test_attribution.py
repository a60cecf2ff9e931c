"""An island on vLLM under load while versions come out: whatever it says a version said, that version said.

In fp32 the log-prob of a fixed prompt's first token is the version's name: it differs between versions by far more
than by what else is in the batch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from sprawl.rollout.engine import EngineError
from sprawl.rollout.gate import Gate, Refused
from sprawl.rollout.reconciler import Reconciler
from sprawl.rollout.service import Service
from sprawl.rollout.wire import SamplingParams, VersionPolicy
from tests.rollout.support import RUN, character_tokenizer
from tests.vllm.bench import VllmBench, config, moved, random_state

VERSIONS = 10
PROMPTS = [[5, 6, 7], [9, 1], [40, 41, 42, 43, 44, 45], [3] * 200]
GREEDY = SamplingParams(max_new_tokens=1, temperature=0)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[VllmBench]:
    settings = config(tied=False)
    made = VllmBench(tmp_path, settings, random_state(settings), dtype="float32")
    yield made
    made.end()


def island(bench: VllmBench) -> Service:
    wake = asyncio.Event()
    gate = Gate("in_place", wake, patience_s=0.2)
    reconciler = Reconciler(bench.reader, bench.engine, gate, follow="eager", wake=wake, poll_s=0.02, copy=bench.copy)
    return Service(
        island_id="island-0",
        run_id=RUN,
        engine=bench.engine,
        gate=gate,
        reconciler=reconciler,
        tokenizer=character_tokenizer(),
        max_wait_s=300.0,
    )


def test_nothing_is_attributed_to_a_version_that_did_not_make_it(bench: VllmBench) -> None:
    async def scenario() -> None:
        service = island(bench)
        following = asyncio.ensure_future(service.reconciler.run())
        heard: list[tuple[int, int, float]] = []  # prompt, version, log-prob of the first token
        truth: dict[tuple[int, int], float] = {}
        crossed = 0

        async def ask(prompt: int, params: SamplingParams, policy: VersionPolicy) -> None:
            nonlocal crossed
            try:
                answer = await service.generate([PROMPTS[prompt]], params, policy)
            except Refused:
                await asyncio.sleep(0.01)
                return
            for sample in answer.groups[0]:
                heard.append((prompt, sample.spans[0].version, sample.logprobs[0]))
                named = [span.version for span in sample.spans]
                assert all(policy.accepts(version) for version in named)
                assert answer.version_start <= named[0] <= named[-1] <= answer.version_end
                crossed += len(named) > 1

        async def client(number: int) -> None:
            while not done.is_set():
                now = service.gate.version or 0
                policies = [
                    VersionPolicy(),
                    VersionPolicy(min_version=now),
                    VersionPolicy(exact_version=now),
                    VersionPolicy(min_version=now, max_version=now + 1),
                ]
                length = 1 if number % 2 else 60
                params = SamplingParams(n=1 + number % 2, max_new_tokens=length, temperature=0)
                await ask(number % len(PROMPTS), params, policies[number % 3 if number < 6 else 3])

        async def reached(version: int) -> None:
            while service.gate.version != version:
                assert service.reconciler.terminal_error is None
                await asyncio.sleep(0.01)

        async def truths(version: int) -> None:
            """What the version says with nobody else there."""
            for prompt in range(len(PROMPTS)):
                (sample,) = await bench.engine.generate(PROMPTS[prompt], GREEDY)
                assert [span.version for span in sample.spans] == [version]
                truth[prompt, version] = sample.logprobs[0]

        done = asyncio.Event()
        await reached(0)
        await truths(0)
        for version in range(1, VERSIONS + 1):
            done.clear()
            clients = [asyncio.ensure_future(client(i)) for i in range(8)]
            await asyncio.sleep(0.5)
            bench.publish(moved(bench.state, 4 * version + 3, share=0.3))
            bench.version = version
            await reached(version)
            await asyncio.sleep(0.3)
            done.set()
            await asyncio.gather(*clients)
            await truths(version)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

        for prompt in range(len(PROMPTS)):
            values = sorted(truth[prompt, version] for version in range(VERSIONS + 1))
            assert min(b - a for a, b in pairwise(values)) > 1e-3
        for prompt, version, logprob in heard:
            assert logprob == pytest.approx(truth[prompt, version], abs=2e-4), (prompt, version)
        counts = Counter(version for _, version, _ in heard)
        assert all(counts[version] for version in range(VERSIONS + 1))
        assert crossed > 0
        assert not any(commit.restarted for commit in bench.engine.commits)
        print(f"{len(heard)} samples, {crossed} of them over a swap")

    bench.run(scenario())


def test_a_request_for_the_old_version_alone_is_not_carried_over_a_swap(bench: VllmBench) -> None:
    async def scenario() -> None:
        service = island(bench)
        following = asyncio.ensure_future(service.reconciler.run())
        exact = VersionPolicy(exact_version=0)
        work = asyncio.ensure_future(service.generate([[5]], SamplingParams(max_new_tokens=500), exact))
        while not service.gate.active:
            await asyncio.sleep(0.01)
        bench.publish(moved(bench.state, 3))
        answer = await work
        assert (answer.version_start, answer.version_end) == (0, 0)
        while service.gate.version != 1:
            await asyncio.sleep(0.01)
        with pytest.raises((Refused, EngineError)):
            await service.generate([[5]], GREEDY, exact)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    bench.run(scenario())
