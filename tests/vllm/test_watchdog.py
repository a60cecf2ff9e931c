"""A server that dies, hangs, or cannot come back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sprawl.rollout.engine import EngineError
from sprawl.rollout.vllm.supervisor import WatchdogOptions
from sprawl.rollout.wire import SamplingParams
from tests.vllm.bench import VllmBench, config, fingerprint, random_state

LONG = SamplingParams(max_new_tokens=900, temperature=0)
QUICK = WatchdogOptions(every_s=0.5, stall_s=2.0, backoff_s=0.2, attempts=2)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBench]:
    settings = config(tied=True)
    made = VllmBench(tmp_path_factory.mktemp("vllm"), settings, random_state(settings), watchdog=QUICK)
    made.run(made.engine.load(made.served))
    yield made
    made.end()


def processes(bench: VllmBench) -> list[psutil.Process]:
    return psutil.Process(bench.engine.info()["pid"]).children(recursive=True)


def named(bench: VllmBench, word: str) -> psutil.Process:
    (found,) = (p for p in processes(bench) if word in " ".join(p.cmdline()))
    return found


async def until(condition: object, limit_s: float = 600.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.05)


async def killed_while_generating(bench: VllmBench, victim: psutil.Process, number: int) -> None:
    """The request in flight ends with an error, and the server comes back at the same version."""
    engine, before = bench.engine, bench.engine.info()
    known = await fingerprint(engine)
    family = processes(bench)
    work = asyncio.ensure_future(engine.generate(bench.prompt, LONG))
    await asyncio.sleep(0.3)
    os.kill(victim.pid, number)
    with pytest.raises(EngineError):
        await work
    await until(lambda: engine.info()["restarts"] > before["restarts"])
    await until(lambda: engine.trouble() is None)
    assert engine.info()["pid"] != before["pid"]
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)
    assert await fingerprint(engine) == known
    assert {span.version for sample in known for span in sample.spans} == {bench.version}


@pytest.mark.parametrize("word", ["EngineCore", "api_server"])
def test_a_server_that_dies_comes_back_at_the_version_it_had(bench: VllmBench, word: str) -> None:
    bench.run(killed_while_generating(bench, named(bench, word), signal.SIGKILL))


def test_a_server_that_hangs_is_killed(bench: VllmBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine stands still, while it goes on to say that it is well."""
    monkeypatch.setattr("sprawl.rollout.vllm.supervisor.CANARY_TIMEOUT_S", 20.0)
    bench.run(killed_while_generating(bench, named(bench, "EngineCore"), signal.SIGSTOP))


def test_a_server_that_dies_during_a_commit_is_at_the_new_version_after_it(bench: VllmBench) -> None:
    async def scenario() -> None:
        engine = bench.engine
        served, changed = await bench.advance()
        await engine.pause()
        named(bench, "EngineCore").kill()
        started = time.monotonic()
        await engine.swap(served, changed)
        await engine.resume()
        commit = engine.commits[-1]
        assert commit.restarted
        assert 0 < commit.pause_s <= time.monotonic() - started + 60
        (sample,) = await engine.generate(bench.prompt, SamplingParams(max_new_tokens=3))
        assert [span.version for span in sample.spans] == [bench.version]

    bench.run(scenario())


def test_a_server_that_never_comes_back_is_given_up(bench: VllmBench) -> None:
    """The last test of the module: the checkpoint is unusable after it."""
    (Path(bench.copy.directory) / "config.json").write_text("{}")

    async def scenario() -> None:
        named(bench, "EngineCore").kill()
        await until(lambda: (trouble := bench.engine.trouble()) is not None and trouble.terminal)
        trouble = bench.engine.trouble()
        assert trouble is not None
        assert "2 times" in trouble.message
        with pytest.raises(EngineError, match="died again"):
            await bench.engine.generate(bench.prompt, LONG)

    bench.run(scenario())
