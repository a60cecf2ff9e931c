"""How long generation stands still for a swap of the 135M model in which every tensor changes: changed elements written
in place, their layers loaded again, vLLM's own reload of its checkpoint, and nothing done, in turn on one server."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

import pytest

from sprawl.policy.checkpoint import load_weights
from sprawl.policy.fetch import ensure_base
from sprawl.rollout.wire import SamplingParams
from tests.vllm.bench import VllmBench, fingerprint, fresh_fingerprint
from tests.vllm.test_smollm2 import one_step

ROUNDS = 9
WAYS = ("staged", "layers", "reload", "nothing")


async def swap(bench: VllmBench, stage: bool) -> float:
    """Seconds of the pause of the next version."""
    bench.publish(one_step(bench.state, bench.version + 1))
    served, changed = await bench.step(stage)
    bench.version += 1
    await bench.engine.pause()
    await bench.engine.swap(served, changed)
    await bench.engine.resume()
    return bench.engine.commits[-1].pause_s


async def pause(bench: VllmBench, way: str) -> float:
    """Seconds of a pause in which vLLM reads its checkpoint again, or does nothing."""
    if way in ("staged", "layers"):
        return await swap(bench, way == "staged")
    began = time.monotonic()
    await bench.engine.pause()
    if way == "reload":
        await bench.engine._supervisor.serving().api.call("reload_weights", 600.0)
    await bench.engine.resume()
    return time.monotonic() - began


async def tokens_per_second(bench: VllmBench, prompt: int, new: int) -> float:
    """Sampled, of eight samples at once behind `prompt` tokens."""
    params = SamplingParams(max_new_tokens=new, temperature=1.0, n=8, seeds=list(range(8)))
    began = time.monotonic()
    await bench.engine.generate([(bench.version + 11 * i) % 40_000 + 9 for i in range(prompt)], params)
    return 8 * new / (time.monotonic() - began)


@pytest.mark.parametrize("plain", [False, True], ids=["repacked", "plain"])
def test_the_pause_of_a_swap(plain: bool, tmp_path: Path) -> None:
    base = ensure_base("smollm2-135m", Path(__file__).parents[2] / "models", print)
    settings = json.loads((base / "config.json").read_text())
    bench = VllmBench(tmp_path, settings, load_weights(base), arguments=("--max-model-len", "1024"), plain=plain)

    async def scenario() -> None:
        engine, pauses = bench.engine, defaultdict(list)
        await engine.load(bench.served)
        for number in range(ROUNDS + 1):
            for way in WAYS[number % 4 :] + WAYS[: number % 4]:
                seconds = await pause(bench, way)
                if number:  # the first round warms the page cache and the allocator
                    pauses[way].append(seconds)
        medians = {way: statistics.median(found) for way, found in pauses.items()}
        staged = [commit for commit in engine.commits if commit.in_place]
        print("\npause, medians:", {way: round(seconds, 4) for way, seconds in medians.items()})
        for way in ("layers", "reload"):
            each = statistics.median(a / b for a, b in zip(pauses["staged"], pauses[way], strict=True))
            print(f"staged / {way}: {medians['staged'] / medians[way]:.3f}, median of rounds {each:.3f}")
        print("load, medians:", statistics.median(commit.load_s for commit in staged) if staged else None)
        print({way: [round(seconds, 4) for seconds in found] for way, found in pauses.items()})
        for commit in staged[-3:]:
            print(commit)
        print("tokens/s, decode:", [round(await tokens_per_second(bench, 8, 64), 1) for _ in range(3)])
        print("tokens/s, long prompts:", [round(await tokens_per_second(bench, 600, 2), 1) for _ in range(3)])
        assert len(staged) == (ROUNDS + 1 if plain else 0)
        assert not any(commit.restarted for commit in engine.commits)
        await swap(bench, stage=True)
        found = await fingerprint(engine)
        await engine.close()
        assert await fresh_fingerprint(bench, bench.snapshot()) == found
        if plain:
            assert medians["staged"] < min(medians["layers"], medians["reload"])

    try:
        bench.run(scenario())
    finally:
        bench.end()
