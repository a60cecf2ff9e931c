"""A server that took ten deltas is, bit for bit, a server started on the version it has reached."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from sprawl.rollout.host_copy import DiskCopy
from sprawl.rollout.wire import Sample, SamplingParams
from tests.vllm.bench import RUN, VllmBench, config, fingerprint, fresh_fingerprint, random_state

DELTAS = 10
FRESH = (3, 6, 10)  # versions on which a server of its own is started


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VllmBench]:
    settings = config(tied=request.param)
    made = VllmBench(tmp_path, settings, random_state(settings))
    yield made
    made.end()


async def swapped(bench: VllmBench) -> list[list[Sample]]:
    """The fingerprint of every version on one server that took them one after another."""
    await bench.engine.load(bench.served)
    found = [await fingerprint(bench.engine)]
    for _ in range(DELTAS):
        served, changed = await bench.advance()
        assert changed
        await bench.engine.pause()
        await bench.engine.swap(served, changed)
        await bench.engine.resume()
        found.append(await fingerprint(bench.engine))
        if bench.version in FRESH:
            bench.snapshot()
    assert not any(commit.restarted for commit in bench.engine.commits)
    await bench.engine.close()
    return found


async def reloaded(bench: VllmBench) -> list[list[Sample]]:
    """The same on a server that reads every tensor of every version anew."""
    copy = DiskCopy(
        bench.directory / "whole", RUN, {"config.json": (bench.copy.directory / "config.json").read_bytes()}
    )
    engine = bench.new_engine(copy.directory)
    try:
        await engine.load(copy.replace(bench.reader.materialise(0)))
        found = [await fingerprint(engine)]
        for version in range(1, DELTAS + 1):
            served = copy.replace(bench.reader.materialise(version))
            await engine.pause()
            await engine.swap(served, served.state.keys())
            await engine.resume()
            found.append(await fingerprint(engine))
        return found
    finally:
        await engine.close()
        copy.close()


def test_ten_deltas_end_where_a_fresh_server_begins(bench: VllmBench) -> None:
    once = bench.run(swapped(bench))
    for version, (before, after) in enumerate(pairwise(once), 1):
        assert [s.logprobs for s in before] != [s.logprobs for s in after], version
        assert {span.version for sample in after for span in sample.spans} == {version}
    for version in FRESH:
        fresh = bench.run(fresh_fingerprint(bench, bench.directory / f"version-{version}"))
        assert fresh == once[version], version
    assert bench.run(reloaded(bench)) == once


def test_what_was_in_flight_goes_on_as_a_fresh_server_would(bench: VllmBench) -> None:
    """A sample that saw a swap is the old version's up to it, and after it what the new version says to that prefix:
    nothing computed with the old weights is used any more."""
    params = SamplingParams(max_new_tokens=400, temperature=0)
    seen: list[int] = []

    def watch(row: int, token: int, logprob: float) -> bool:
        seen.append(token)
        return False

    async def scenario() -> None:
        engine = bench.engine
        await engine.load(bench.served)
        (old,) = await engine.generate(bench.prompt, params)
        served, changed = await bench.advance()
        work = asyncio.ensure_future(engine.generate(bench.prompt, params, watch))
        while len(seen) < 50:
            await asyncio.sleep(0.001)
        await engine.pause()
        await engine.swap(served, changed)
        await engine.resume()
        (sample,) = await work
        first, second = sample.spans
        assert (first.version, second.version, second.end) == (0, 1, 400)
        assert sample.token_ids[: first.end] == old.token_ids[: first.end]
        assert sample.logprobs[: first.end] == old.logprobs[: first.end]
        rest = SamplingParams(max_new_tokens=400 - first.end, temperature=0)
        prefix = bench.prompt + sample.token_ids[: first.end]
        (new,) = await engine.generate(prefix, rest)
        assert new.token_ids == sample.token_ids[first.end :]
        assert new.logprobs == pytest.approx(sample.logprobs[first.end :], abs=0.05)
        assert old.token_ids != sample.token_ids

    bench.run(scenario())
