"""What an island keeps on disk, and what becomes of it when the engine refuses a version or the process ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sprawl.board.local_copy import LocalCopy
from sprawl.delta.files import WEIGHTS
from sprawl.errors import SprawlError
from sprawl.rollout.engine import EngineError, Trouble
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.gate import GateClosed
from sprawl.rollout.host_copy import DiskCopy, HostCopy, MemoryCopy
from sprawl.rollout.wire import SamplingParams, VersionPolicy
from tests.rollout.support import RUN, Stack, TinyRun, go, until

FILES = {"config.json": b"{}"}


@pytest.fixture(params=["memory", "disk"])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> HostCopy:
    return MemoryCopy() if request.param == "memory" else DiskCopy(tmp_path / "copy", RUN, FILES)


async def ask(stack: Stack, policy: VersionPolicy | None = None) -> list[int]:
    answer = await stack.service.generate([[5]], SamplingParams(max_new_tokens=2), policy or VersionPolicy())
    return answer.groups[0][0].token_ids


def applied(engine: FakeEngine) -> list[tuple[str, int]]:
    return [(call[0], call[1]) for call in engine.calls if call[0] in ("load", "swap")]


def on_disk(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    copy = LocalCopy.open(folder)
    assert copy is not None
    return copy.served.version, load_file(folder / WEIGHTS)


def test_a_refused_version_is_undone_and_stepped_over(copy: HostCopy, tmp_path: Path) -> None:
    """A request in flight goes on, the old version is served on, the next version is taken from there."""

    async def scenario() -> None:
        run, engine = TinyRun().publish(1), FakeEngine(token_s=0.001)
        engine.refuses = {1}
        async with Stack(run, engine, follow="eager", copy=copy) as stack:
            await until(lambda: stack.gate.version == 0)
            long = SamplingParams(max_new_tokens=300)
            running = asyncio.ensure_future(stack.service.generate([[5]], long, VersionPolicy()))
            await until(lambda: engine.active == 1)
            run.publish()
            await until(lambda: "version 1 is not served, 0 is" in (stack.reconciler.last_error or ""))
            assert await ask(stack) == [0, 0]
            assert stack.service.ready
            if isinstance(copy, DiskCopy):
                version, state = on_disk(copy.directory)
                assert version == 0
                assert all(torch.equal(state[name], run.states[0][name]) for name in state)
            await asyncio.sleep(0.1)
            assert stack.reconciler.last_error is not None
            assert applied(engine) == [("load", 0), ("swap", 1), ("load", 0)]
            run.publish()
            await until(lambda: stack.gate.version == 2)
            await until(lambda: stack.reconciler.last_error is None)
            assert await ask(stack) == [2, 2]
            answer = await running
            assert {span.version for span in answer.groups[0][0].spans} <= {0, 2}
            served = stack.reconciler._served
            assert served is not None
            assert all(torch.equal(served.state[name], run.states[2][name]) for name in served.state)
            assert stack.reconciler.versions_applied == 2

    go(scenario())


def test_an_engine_that_cannot_begin_anew_is_terminal() -> None:
    class Broken(FakeEngine):
        async def load(self, served: object) -> None:
            if self.version is not None:
                raise EngineError("it does not start any more")
            await super().load(served)  # type: ignore[arg-type]

    async def scenario() -> None:
        run, engine = TinyRun().publish(1), Broken()
        engine.refuses = {1}
        async with Stack(run, engine, follow="eager") as stack:
            await until(lambda: stack.gate.version == 0)
            run.publish()
            await until(lambda: stack.reconciler.terminal_error is not None)
            assert "does not start" in (stack.reconciler.terminal_error or "")
            with pytest.raises(GateClosed):
                await ask(stack)

    go(scenario())


def test_an_engine_in_trouble_is_not_ready_and_gives_up_for_the_island() -> None:
    async def scenario() -> None:
        run, engine = TinyRun().publish(1), FakeEngine()
        async with Stack(run, engine, follow="eager") as stack:
            await until(lambda: stack.gate.version == 0)
            engine.failing = Trouble("it is being restarted")
            assert not stack.service.ready
            assert stack.service.not_ready_reason == "it is being restarted"
            run.publish()
            await asyncio.sleep(0.05)
            assert stack.gate.version == 0
            engine.failing = None
            await until(lambda: stack.gate.version == 1)
            assert stack.service.ready
            engine.failing = Trouble("it died five times", terminal=True)
            await asyncio.wait_for(stack.task, 5)
            assert stack.reconciler.terminal_error == "it died five times"
            with pytest.raises(GateClosed, match="five times"):
                await ask(stack)

    go(scenario())


@pytest.mark.parametrize("left_at", [2, 4])
def test_a_new_life_goes_on_from_what_the_old_one_left(tmp_path: Path, left_at: int) -> None:
    async def life(run: TinyRun, version: int) -> int:
        copy, engine = DiskCopy(tmp_path, RUN, FILES), FakeEngine()
        reader = run.reader()
        async with Stack(run, engine, reader=reader, copy=copy) as stack:
            assert await ask(stack, VersionPolicy(exact_version=version)) == [version] * 2
            assert applied(engine)[0] == ("load", version)
        copy.close()
        assert on_disk(tmp_path)[0] == version
        return reader.bytes_read

    run = TinyRun(keyframe_every=100).publish(5)
    whole = go(life(run, left_at))
    again = go(life(run, 4))
    assert again < whole if left_at == 2 else again == 0
    assert go(life(run, 1)) > again  # older than what is there: written anew
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.json", WEIGHTS, "sprawl.json"]


def test_a_copy_of_another_run_or_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    run = TinyRun().publish(1)
    served = run.reader().materialise(0)
    other = DiskCopy(tmp_path, "run-2", FILES)
    other.replace(served)
    assert other.open() is not None
    other.close()
    mine = DiskCopy(tmp_path, RUN, FILES)
    assert mine.open() is None
    mine.replace(served)
    data = bytearray((tmp_path / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (tmp_path / WEIGHTS).write_bytes(data)
    assert mine.open() is None


def test_two_islands_do_not_share_a_directory(tmp_path: Path) -> None:
    first = DiskCopy(tmp_path, RUN, FILES)
    with pytest.raises(SprawlError, match="another island"):
        DiskCopy(tmp_path, RUN, FILES)
    first.close()
    DiskCopy(tmp_path, RUN, FILES).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(SprawlError, match="cannot write"):
        DiskCopy(tmp_path / "file", RUN, FILES)
