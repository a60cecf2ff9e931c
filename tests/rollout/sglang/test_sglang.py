"""SGLang's adapter against a server that behaves as SGLang's source says."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sprawl.board.local_copy import verify
from sprawl.errors import SprawlError
from sprawl.rollout.engine import EngineError
from sprawl.rollout.engines import equip
from sprawl.rollout.host_copy import DiskCopy
from sprawl.rollout.sglang.api import Heard
from sprawl.rollout.sglang.server import parse_arguments
from sprawl.rollout.vllm.supervisor import WatchdogOptions
from sprawl.rollout.wire import SamplingParams
from tests.rollout.conformance import EngineConformance, swap_and_resume
from tests.rollout.sglang.bench import SglangBench
from tests.rollout.support import until
from tests.rollout.test_engines import context

QUICK = WatchdogOptions(every_s=0.1, answer_within_s=1.0, misses=2, backoff_s=0.05, attempts=2, lasts_s=600.0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangBench]:
    made = SglangBench(tmp_path_factory.mktemp("sglang"))
    made.run(made.engine.load(made.served))
    yield made
    made.end()


@pytest.fixture
def closing(tmp_path: Path) -> Iterator[SglangBench]:
    made = SglangBench(tmp_path)
    made.run(made.engine.load(made.served))
    yield made
    made.end()


class TestSglang(EngineConformance):
    pass


def test_tokens_change_with_the_weights(bench: SglangBench) -> None:
    async def scenario() -> None:
        params = SamplingParams(max_new_tokens=12, temperature=0)
        before = await bench.engine.generate(bench.prompt, params)
        served, changed = await bench.advance()
        await bench.engine.pause()
        await swap_and_resume(bench, served, changed)
        after = await bench.engine.generate(bench.prompt, params)
        assert [sample.token_ids for sample in after] != [sample.token_ids for sample in before]
        assert bench.engine.commits[-1].version == bench.version
        assert not bench.engine.commits[-1].restarted

    bench.run(scenario())


def test_an_update_that_fails_is_made_good_by_a_new_server(bench: SglangBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server says that it rolled back; nobody can vouch for that, and the checkpoint is at the new version."""

    async def scenario() -> None:
        served, changed = await bench.advance()
        await bench.engine.pause()
        file = bench.directory / "checkpoint" / "model.safetensors"
        whole = file.read_bytes()
        pid = bench.engine.info()["pid"]
        file.write_bytes(whole[:-2])

        def repaired(checkpoint: Path) -> None:
            """What a new server starts from is checked first: whole again by then."""
            file.write_bytes(whole)
            verify(checkpoint)

        monkeypatch.setattr("sprawl.rollout.vllm.supervisor.verify", repaired)
        await swap_and_resume(bench, served, changed)
        assert bench.engine.info()["pid"] != pid
        (sample,) = await bench.engine.generate(bench.prompt, SamplingParams(max_new_tokens=3))
        assert [span.version for span in sample.spans] == [bench.version]
        assert bench.engine.commits[-1].restarted

    bench.run(scenario())


def test_closing_over_an_open_request_leaves_no_failure_behind(tmp_path: Path) -> None:
    """What would only be said when the garbage is collected, in the middle of somebody else's work."""
    bench, said = SglangBench(tmp_path), []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        await bench.engine.load(bench.served)
        running = asyncio.ensure_future(bench.engine.generate(bench.prompt, SamplingParams(n=4, max_new_tokens=5000)))
        await until(lambda: bench.engine.info()["running_groups"] == 1)
        await bench.engine.close()
        with pytest.raises(EngineError):
            await running
        del running
        for _ in range(3):
            await asyncio.sleep(0)
            gc.collect()

    bench.run(scenario())
    assert said == []


def test_a_server_that_dies_is_replaced(tmp_path: Path) -> None:
    bench = SglangBench(tmp_path, watchdog=QUICK)

    async def scenario() -> None:
        await bench.engine.load(bench.served)
        params = SamplingParams(max_new_tokens=6, temperature=0)
        before = await bench.engine.generate(bench.prompt, params)
        os.killpg(bench.engine.info()["pid"], signal.SIGKILL)
        await until(lambda: bench.engine.trouble() is not None)
        await until(lambda: bench.engine.trouble() is None, 30.0)
        assert await bench.engine.generate(bench.prompt, params) == before

    bench.run(scenario())
    bench.end()


def test_a_server_that_names_no_versions_is_not_used(tmp_path: Path) -> None:
    """Older releases say at the end which version they serve then, which is not what made the tokens."""
    bench = SglangBench(tmp_path, variables={"FAKE_SGLANG_SPANS": "0"})
    with pytest.raises(EngineError, match="which version made each"):
        bench.run(bench.engine.load(bench.served))
    bench.end()


def test_nobody_without_the_key_reaches_the_server(closing: SglangBench) -> None:
    server = closing.engine._supervisor.server
    assert server is not None
    command = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")
    port = command[command.index(b"--port") + 1].decode()
    config = Path(command[command.index(b"--config") + 1].decode())
    key = config.read_text().split()[1]
    assert key.encode() not in b" ".join(command)
    assert config.parent.stat().st_mode & 0o077 == 0
    answer = httpx.post(f"http://127.0.0.1:{port}/pause_generation", json={"mode": "retract"})
    assert answer.status_code == 401


def test_an_island_gets_it_by_name(tmp_path: Path) -> None:
    equipment = equip("sglang", context(tmp_path, "--tp-size 2"))
    assert equipment.engine.info()["kind"] == "sglang"
    assert isinstance(equipment.copy, DiskCopy)
    assert equipment.copy.directory == tmp_path / "checkpoint"
    equipment.copy.close()
    with pytest.raises(SprawlError, match="--engine-args: --host is set by the island"):
        equip("sglang", context(tmp_path, "--host 0.0.0.0"))


def event(tokens: list[int], logprobs: list[float | None], **meta: object) -> dict[str, object]:
    pairs = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=False)]
    return {"output_ids": tokens, "meta_info": {"output_token_logprobs": pairs, **meta}}


def test_a_stream_repeats_itself_and_only_what_is_new_counts() -> None:
    heard = Heard()
    assert heard.add(event([4], [-1.0])) == [(4, -1.0)]
    assert heard.add(event([4, 5], [-1.0, -2.0])) == [(5, -2.0)]
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    assert heard.add(event([4, 5], [-1.0, -2.0], finish_reason={"type": "length"}, weight_versions=spans)) == []
    sample = heard.sample()
    assert (sample.token_ids, sample.finish_reason) == ([4, 5], "length")
    assert [(span.version, span.start, span.end) for span in sample.spans] == [(7, 0, 1), (8, 1, 2)]


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([event([4], [None])], "non-finite"),
        ([event([4], [float("nan")])], "non-finite"),
        ([event([4, 5], [-1.0])], "without their log-probs"),
        ([event([4], [-1.0]), event([5], [-1.0])], "took tokens back"),
        ([event([4], [-1.0], weight_versions=[{"version": "default", "start": 0, "end": 1}])], "names a version"),
    ],
)
def test_what_cannot_be_vouched_for_is_refused(events: list[dict[str, object]], complaint: str) -> None:
    heard = Heard()
    for each in events[:-1]:
        heard.add(each)
    with pytest.raises(EngineError, match=complaint):
        heard.add(events[-1])


@pytest.mark.parametrize(
    "text", ["--port 1", "--api-key=x", "--incremental-streaming-output", "--weight-version 3", "'"]
)
def test_what_the_island_decides_cannot_be_given(text: str) -> None:
    with pytest.raises(SprawlError, match="--engine-args"):
        parse_arguments(text)
    assert parse_arguments("--tp-size 2 --mem-fraction-static 0.8") == (
        "--tp-size",
        "2",
        "--mem-fraction-static",
        "0.8",
    )
