"""The 135M model, whose deltas look like those of reinforcement learning: about one weight in a hundred moves by one
step of its dtype, in every tensor."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from sprawl.delta.state import State
from sprawl.policy.checkpoint import load_weights
from sprawl.policy.fetch import ensure_base
from tests.vllm.bench import VllmBench, fingerprint, fresh_fingerprint

DELTAS = 10
FRESH = (5, 10)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBench]:
    """Downloads the model once, into `models`."""
    base = ensure_base("smollm2-135m", Path(__file__).parents[2] / "models", print)
    settings = json.loads((base / "config.json").read_text())
    folder = tmp_path_factory.mktemp("smollm2")
    made = VllmBench(folder, settings, load_weights(base), arguments=("--max-model-len", "1024"))
    yield made
    made.end()


def one_step(state: State, version: int) -> State:
    """Some bf16 weights become their neighbour."""
    generator = torch.Generator().manual_seed(version)
    following = {}
    for name, tensor in state.items():
        hit = torch.rand(tensor.shape, generator=generator) < 0.01
        following[name] = (tensor.view(torch.int16) + hit.to(torch.int16)).view(torch.bfloat16)
    return following


def resident_gb(bench: VllmBench) -> float:
    family = psutil.Process(bench.engine.info()["pid"]).children(recursive=True)
    return sum(process.memory_info().rss for process in family) / 1e9


def test_ten_deltas_end_where_a_fresh_server_begins(bench: VllmBench) -> None:
    async def scenario() -> None:
        engine, found, reload_s = bench.engine, {}, []
        started = time.monotonic()
        await engine.load(bench.served)
        print(f"\nstart {time.monotonic() - started:.1f} s, {resident_gb(bench):.2f} GB resident")
        assert engine.limits.max_length == 1024
        for version in range(1, DELTAS + 1):
            bench.publish(one_step(bench.state, version))
            served, changed = await bench.step()
            bench.version = version
            await engine.pause()
            await engine.swap(served, changed)
            await engine.resume()
            if version in FRESH:
                found[version] = await fingerprint(engine)
                bench.snapshot()
        for commit in engine.commits:
            print(commit)
        assert not any(commit.restarted for commit in engine.commits)
        # The way without a backend of ours: vLLM reads its checkpoint again, paused as above.
        for _ in range(3):
            began = time.monotonic()
            await engine.pause()
            api = engine._supervisor.serving().api
            await api.command("/collective_rpc", 600.0, {"method": "reload_weights"})
            await engine.resume()
            reload_s.append(time.monotonic() - began)
        print("full reload while paused:", [round(seconds, 3) for seconds in reload_s])
        print(f"{resident_gb(bench):.2f} GB resident")
        await engine.close()
        for version in FRESH:
            fresh = await fresh_fingerprint(bench, bench.directory / f"version-{version}")
            assert fresh == found[version], version
        assert [s.logprobs for s in found[5]] != [s.logprobs for s in found[10]]

    bench.run(scenario())
