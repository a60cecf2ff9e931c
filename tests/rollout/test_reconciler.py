"""Following the board: which version next, and what happens when the board or the weights misbehave."""

from __future__ import annotations

import asyncio

import pytest
import torch

from sprawl.board import keys
from sprawl.board.retention import gc
from sprawl.errors import BoardError
from sprawl.rollout.engine import EngineError
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.gate import GateClosed, Refused
from sprawl.rollout.reconciler import next_target
from sprawl.rollout.targets import LEAP
from sprawl.rollout.wire import SamplingParams, VersionPolicy
from tests.rollout.support import RUN, Stack, TinyRun, go, until

EXACT_3 = VersionPolicy(exact_version=3)
MIN_2 = VersionPolicy(min_version=2)
MAX_4 = VersionPolicy(max_version=4)
ANY = VersionPolicy()


@pytest.mark.parametrize(
    ("follow", "applied", "head", "waiting", "expected"),
    [
        ("eager", None, None, [ANY], None),
        ("eager", None, 5, [], 5),
        ("demand", None, 5, [], None),
        ("demand", None, 5, [ANY], 5),
        ("demand", None, 5, [MAX_4], 4),
        ("demand", None, 3, [MAX_4], 3),
        ("demand", None, 5, [EXACT_3, MIN_2], 2),
        ("demand", None, 1, [EXACT_3], None),
        ("eager", None, 1, [EXACT_3], 1),
        ("eager", None, 5, [EXACT_3], 3),
        ("demand", 1, 5, [], None),
        ("demand", 1, 5, [EXACT_3], 2),
        ("demand", 3, 5, [EXACT_3, ANY], None),
        ("eager", 3, 5, [], 4),
        ("eager", 5, 5, [VersionPolicy(min_version=9)], None),
        ("eager", 3, 3 + LEAP, [], 4),
        ("eager", 3, 40, [], 40),
        ("eager", 3, 40, [VersionPolicy(exact_version=7), ANY], 7),
        ("demand", 1, 40, [ANY], None),
        ("demand", 1, 40, [EXACT_3], 3),
        ("demand", 1, 40, [VersionPolicy(min_version=30), VersionPolicy(min_version=50)], 30),
        ("demand", 1, 40, [VersionPolicy(min_version=50)], 40),
    ],
)
def test_next_target(follow, applied, head, waiting, expected) -> None:
    assert next_target(follow, applied, head, waiting) == expected


async def ask(stack: Stack, policy: VersionPolicy = ANY, tokens: int = 2) -> tuple[int, int]:
    answer = await stack.service.generate([[5]], SamplingParams(max_new_tokens=tokens), policy)
    return answer.version_start, answer.version_end


def applied_versions(engine: FakeEngine) -> list[int]:
    return [call[1] for call in engine.calls if call[0] in ("load", "swap")]


def test_demand_materialises_exactly_what_the_first_request_needs_then_steps() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with Stack(TinyRun().publish(7), engine) as stack:
            await asyncio.sleep(0.05)
            assert engine.calls == []
            assert await ask(stack, VersionPolicy(exact_version=2)) == (2, 2)
            assert await ask(stack, VersionPolicy(min_version=5)) == (5, 5)
            assert applied_versions(engine) == [2, 3, 4, 5]
            assert stack.reconciler.versions_applied == stack.reconciler.versions_verified == 4
            with pytest.raises(Refused) as caught:
                await ask(stack, EXACT_3)
            assert not caught.value.answer.retryable

    go(scenario())


def test_demand_waits_for_a_version_that_is_not_out_yet() -> None:
    async def scenario() -> None:
        run = TinyRun().publish(1)
        async with Stack(run) as stack:
            request = asyncio.ensure_future(ask(stack, VersionPolicy(min_version=2)))
            await asyncio.sleep(0.05)
            run.publish(2)
            assert await request == (2, 2)

    go(scenario())


def test_eager_follows_and_only_changed_tensors_are_named() -> None:
    async def scenario() -> None:
        run, engine = TinyRun().publish(2), FakeEngine()
        async with Stack(run, engine, follow="eager") as stack:
            await until(lambda: stack.gate.version == 1)
            run.publish(3)
            await until(lambda: stack.gate.version == 4)
            assert applied_versions(engine) == [1, 2, 3, 4]
            swaps = [call for call in engine.calls if call[0] == "swap"]
            assert all(call[2] == {"b"} for call in swaps)
            names = [call[0] for call in engine.calls]
            assert names == ["load"] + ["pause", "swap", "resume"] * 3

    go(scenario())


@pytest.mark.parametrize("mode", ["in_place", "quiesce"])
def test_every_token_is_attributed_to_the_version_that_made_it(mode: str) -> None:
    """Versions come out while requests of every policy run. The fake engine's tokens name their version."""

    async def scenario() -> None:
        run, engine = TinyRun().publish(1), FakeEngine(token_s=0.001)
        async with Stack(run, engine, follow="eager", mode=mode, patience_s=0.02) as stack:
            swapped_inside = 0
            await until(lambda: stack.gate.version == 0)

            async def client(number: int) -> None:
                nonlocal swapped_inside
                while stack.gate.version != 12:
                    now = stack.gate.version or 0
                    policy = [
                        ANY,
                        VersionPolicy(min_version=now),
                        VersionPolicy(exact_version=now),
                        VersionPolicy(min_version=now, max_version=now + 1),
                    ][number % 4]
                    try:
                        answer = await stack.service.generate([[5]], SamplingParams(n=2, max_new_tokens=8), policy)
                    except Refused:
                        await asyncio.sleep(0.001)
                        continue
                    for sample in answer.groups[0]:
                        named = [span.version for span in sample.spans for _ in range(span.start, span.end)]
                        assert sample.token_ids == named
                        assert all(policy.accepts(version) for version in named)
                        swapped_inside += len(sample.spans) > 1

            async def trainer() -> None:
                for _ in range(12):
                    run.publish()
                    await asyncio.sleep(0.01)

            await asyncio.gather(trainer(), *(client(i) for i in range(8)))
            assert applied_versions(engine) == list(range(13))
            assert (swapped_inside > 0) == (mode == "in_place")

    go(scenario())


class FlakyReader:
    """A reader whose board fails as often as told."""

    def __init__(self, run: TinyRun) -> None:
        self._reader = run.reader()
        self.failing = 0

    def __getattr__(self, name: str):
        def call(*arguments):
            if self.failing:
                self.failing -= 1
                raise BoardError("board memory:// is unreachable")
            return getattr(self._reader, name)(*arguments)

        return call


def test_a_board_that_fails_for_a_while_does_not_stop_serving() -> None:
    async def scenario() -> None:
        run = TinyRun().publish(1)
        reader = FlakyReader(run)
        async with Stack(run, follow="eager", reader=reader) as stack:
            await until(lambda: stack.gate.version == 0)
            reader.failing = 4
            run.publish()
            await until(lambda: stack.reconciler.last_error is not None)
            assert await ask(stack) == (0, 0)
            await until(lambda: stack.gate.version == 1)
            await until(lambda: stack.reconciler.last_error is None)
            assert stack.reconciler.terminal_error is None

    go(scenario())


def test_a_damaged_delta_is_never_served_and_a_keyframe_heals() -> None:
    async def scenario() -> None:
        run, engine = TinyRun(keyframe_every=3).publish(4), FakeEngine()
        manifest = run.reader().manifest(3)  # a keyframe, which also holds a delta
        assert manifest is not None
        delta = manifest.blob("delta")
        assert delta is not None
        run.store.put(keys.blob(RUN, 3, delta.digest), bytes(delta.size))
        async with Stack(run, engine) as stack:
            assert await ask(stack, VersionPolicy(exact_version=2)) == (2, 2)
            request = asyncio.ensure_future(ask(stack, VersionPolicy(min_version=3)))
            await until(lambda: "damaged" in (stack.reconciler.last_error or ""))
            assert await ask(stack) == (2, 2)
            assert await request == (3, 3)
            assert applied_versions(engine) == [2, 3]
            assert stack.reconciler.versions_verified == 2

    go(scenario())


class LyingReader:
    """Its commits leave one bit wrong and do not notice."""

    def __init__(self, run: TinyRun) -> None:
        self._reader = run.reader()

    def __getattr__(self, name: str):
        return getattr(self._reader, name)

    def commit(self, served, prepared) -> None:
        self._reader.commit(served, prepared)
        served.root = "f" * 64


def test_a_state_that_is_not_the_published_one_is_terminal() -> None:
    async def scenario() -> None:
        run, engine = TinyRun().publish(1), FakeEngine(token_s=0.01)
        async with Stack(run, engine, follow="eager", reader=LyingReader(run)) as stack:
            await until(lambda: stack.gate.version == 0)
            running = asyncio.ensure_future(ask(stack, tokens=1000))
            await until(lambda: engine.active == 1)
            run.publish()
            await until(lambda: stack.reconciler.state == "ERROR")
            with pytest.raises(EngineError):
                await running
            with pytest.raises(GateClosed, match="not the published one"):
                await ask(stack)
            assert not stack.service.ready
            assert "version 1" in (stack.reconciler.terminal_error or "")
            assert stack.reconciler.versions_applied == 1
            assert applied_versions(engine) == [0]
            await asyncio.wait_for(stack.task, 5)

    go(scenario())


def test_a_pruned_chain_is_jumped_over() -> None:
    async def scenario() -> None:
        run, engine = TinyRun(keyframe_every=4).publish(1), FakeEngine()
        async with Stack(run, engine, follow="demand") as stack:
            assert await ask(stack) == (0, 0)
            run.publish(9)
            gc(run.store, RUN, keep_versions=1, dry_run=False)
            assert run.reader().manifest(1) is None
            assert await ask(stack, VersionPolicy(min_version=9)) == (9, 9)
            assert applied_versions(engine) == [0, 9]
            served = stack.reconciler._served
            assert served is not None
            assert all(torch.equal(served.state[name], run.states[9][name]) for name in ("a", "b"))

    go(scenario())
