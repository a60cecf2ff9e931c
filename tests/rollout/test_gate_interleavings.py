"""Every order of admissions, departures, cancellations, swaps that succeed and fail, run switches and closing.

First on the pure machine: all reachable states of small worlds, depth first. Then on the real gate, service and fake
engine: all schedules with few departures from the usual order.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.gate import CommitMode, CommitUndone, GateClosed, GateState, Refused
from sprawl.rollout.service import Service
from sprawl.rollout.wire import SamplingParams, VersionPolicy
from tests.rollout.schedules import every_schedule, run_once
from tests.rollout.support import Stack, TinyRun

ANY = VersionPolicy()
A, B = "run-a", "run-b"


def exact(version: int, **more: Any) -> VersionPolicy:
    return VersionPolicy(exact_version=version, **more)


def at_least(version: int, **more: Any) -> VersionPolicy:
    return VersionPolicy(min_version=version, **more)


# --- the pure machine ---


@dataclasses.dataclass(frozen=True)
class Move:
    """What the reconciler does next, and how the install will end."""

    version: int
    end: str = "swap"  # or "fail", or "undo"
    run_id: str | None = None


@dataclasses.dataclass
class World:
    """A gate in run A at version 3, an engine, requests that have not come yet, and moves to make in order."""

    state: GateState
    policies: tuple[VersionPolicy, ...]
    moves: tuple[Move, ...]
    engine: tuple[str, int] = (A, 3)
    phase: str = "idle"  # of the move: idle, proposed, installing, swapped
    made: int = 0
    closings: int = 0
    asked: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)  # request -> epoch and run on arrival
    tickets: dict[int, Any] = dataclasses.field(default_factory=dict)
    ended: dict[int, str] = dataclasses.field(default_factory=dict)

    def clone(self) -> World:
        twin = copy.copy(self)
        twin.state = copy.copy(self.state)
        twin.state.active = dict(self.state.active)
        twin.state._numbers = copy.copy(self.state._numbers)
        twin.asked, twin.tickets, twin.ended = dict(self.asked), dict(self.tickets), dict(self.ended)
        return twin

    def key(self) -> tuple[Any, ...]:
        state = self.state
        facts = (state.version, state.run_id, state.pending, state.pending_run, state.committing, state.overdue)
        tickets = {i: (t.version, t.run_id, t.begun == state.begun) for i, t in self.tickets.items()}
        requests = tuple((self.asked.get(i), tickets.get(i), self.ended.get(i)) for i in range(len(self.policies)))
        return (*facts, state.closed is None, state.epoch, self.engine, self.phase, self.made, self.closings, requests)

    def events(self) -> Iterator[tuple[str, int]]:
        for i, policy in enumerate(self.policies):
            if i not in self.asked:
                yield "arrive", i
            elif i in self.tickets:
                yield "leave", i
            elif i not in self.ended:
                yield "give up", i  # cancelled, or its time is over
                if self.state.verdict(policy, self.asked[i][0]) != "wait":
                    yield "enter", i
        if self.made < len(self.moves):
            if self.phase == "idle" and self.state.closed is None:
                yield "propose", 0
            elif self.phase == "proposed":
                if self.state.closed is not None:
                    yield "withdraw", 0
                elif self.state.may_commit():
                    yield "begin", 0
                if not self.state.overdue:
                    yield "overdue", 0
                yield "withdraw", 0  # the reconciler is cancelled
            elif self.phase == "installing":
                yield self.moves[self.made].end, 0
            elif self.phase == "swapped":
                yield "finish", 0
        if not self.closings:
            yield "close", 0

    def after(self, event: tuple[str, int]) -> World:
        world = self.clone()
        world._do(*event)
        return world

    def _do(self, name: str, i: int) -> None:
        state = self.state
        match name:
            case "arrive":
                self.asked[i] = state.epoch, state.run_id or ""
            case "enter":
                verdict = state.verdict(self.policies[i], self.asked[i][0])
                if verdict == "admit":
                    assert state.closed is None
                    assert not state.committing
                    assert state.pending_run is None
                    self.tickets[i] = state.admit(self.policies[i])
                else:
                    self.ended[i] = verdict
            case "leave":
                state.leave(self.tickets.pop(i))
                self.ended[i] = "served"
            case "give up":
                self.ended[i] = "gave up"
            case "propose":
                state.propose(self.moves[self.made].version, self.moves[self.made].run_id)
                self.phase = "proposed"
            case "overdue":
                state.overdue = True
            case "begin":
                state.begin()
                self.phase = "installing"
            case "swap":
                move = self.moves[self.made]
                self.engine = move.run_id or self.engine[0], move.version
                self.phase = "swapped"
            case "fail":
                state.fail("half a state")
                self.phase, self.made = "idle", len(self.moves)
            case "undo":
                state.abandon()
                self.phase, self.made = "idle", self.made + 1
            case "finish":
                state.finish()
                self.phase, self.made = "idle", self.made + 1
            case "withdraw":
                state.withdraw()
                self.phase, self.made = "idle", len(self.moves)
            case "close":
                state.closed = state.closed or "draining"
                self.closings += 1

    def check(self) -> None:
        """What must hold in every state, because in every state the engine may make a token for every ticket."""
        run_id, version = self.engine
        newest = self.state.newest
        assert newest is not None
        assert self.state.committing == (self.phase in ("installing", "swapped"))
        for i, ticket in self.tickets.items():
            assert self.policies[i].accepts(version)
            assert ticket.run_id == run_id
            assert ticket.version <= version <= newest
            if ticket.begun == self.state.begun:
                assert ticket.version == version
            if not self.policies[i].open:
                # Versions are those of the run that was there when the request came, or of the one it names.
                assert run_id == (self.policies[i].run_id or self.asked[i][1])
        if self.state.mode == "quiesce" and self.phase in ("installing", "swapped"):
            assert not self.tickets
        if self.phase == "idle" and self.state.closed is None:
            assert self.engine == (self.state.run_id, self.state.version)

    def check_end(self) -> None:
        """Nothing can happen any more: nobody is left waiting, and no commit is left half way."""
        assert set(self.ended) == set(range(len(self.policies)))
        assert self.phase == "idle"
        assert not self.state.active


def explore(world: World) -> tuple[int, set[str]]:
    """Visit every reachable state once; returns how many, and the ways in which requests ended."""
    seen: set[tuple[Any, ...]] = set()
    endings: set[str] = set()
    todo = [world]
    while todo:
        world = todo.pop()
        key = world.key()
        if key in seen:
            continue
        seen.add(key)
        world.check()
        endings.update(world.ended.values())
        events = list(world.events())
        if not events:
            world.check_end()
        todo.extend(world.after(event) for event in events)
    return len(seen), endings


SWAPS = (Move(4), Move(5))
SWITCH = (Move(4), Move(0, run_id=B), Move(1))
UNDONE = (Move(4, "undo"), Move(0, "undo", run_id=B), Move(5))


@pytest.mark.parametrize("mode", ["in_place", "quiesce"])
@pytest.mark.parametrize(
    ("policies", "moves", "endings"),
    [
        ((ANY, exact(3), at_least(4), VersionPolicy(max_version=4)), SWAPS, {"passed", "held"}),
        ((ANY, exact(4), exact(3)), (Move(4), Move(5, "fail")), {"passed", "held", "closed"}),
        ((ANY, at_least(4), exact(1, run_id=B)), SWITCH, {"moved", "elsewhere"}),
        ((ANY, exact(3), at_least(4), VersionPolicy(run_id=A)), UNDONE, {"held", "moved", "elsewhere"}),
        ((at_least(0), exact(0), VersionPolicy(run_id=A)), (Move(0, "fail", run_id=B),), {"moved", "elsewhere"}),
    ],
)
def test_no_order_of_events_breaks_the_gate(
    mode: CommitMode, policies: tuple[VersionPolicy, ...], moves: tuple[Move, ...], endings: set[str]
) -> None:
    states, seen = explore(World(GateState(mode, version=3, run_id=A), policies, moves))
    assert states > 500
    assert seen >= endings | {"served", "gave up", "closed"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: setattr(state, "committing", False),  # admission open during an install
        lambda state: setattr(state, "pending_run", None),  # a switch that does not drain
    ],
)
def test_the_exploration_notices_a_broken_gate(spoil: Callable[[GateState], None], monkeypatch: Any) -> None:
    for name in ("begin", "propose"):
        sound = getattr(GateState, name)

        def broken(self: GateState, *arguments: Any, sound: Any = sound) -> None:
            sound(self, *arguments)
            spoil(self)

        monkeypatch.setattr(GateState, name, broken)
    with pytest.raises(AssertionError):
        explore(World(GateState("in_place", version=3, run_id=A), (ANY, at_least(3)), SWITCH))


# --- the real gate, service and fake engine ---

THREE = SamplingParams(max_new_tokens=3)
RUN = TinyRun().publish(1)


def island(mode: CommitMode) -> Stack:
    """Run A at version 3. Nobody runs the reconciler: the scenarios move the gate themselves."""
    stack = Stack(RUN, FakeEngine(), mode=mode, max_wait_s=60.0, patience_s=30.0)
    stack.gate.state.version, stack.gate.state.run_id = 3, A
    stack.engine.version = 3  # type: ignore[attr-defined]
    return stack


async def ask(service: Service, policy: VersionPolicy) -> str:
    """How a request ends; the fake's tokens are the numbers of the versions that made them."""
    heard: list[tuple[int, int | None]] = []

    def see(row: int, token: int, logprob: float, version: int | None) -> bool:
        heard.append((token, version))
        return False

    try:
        answer = await service.generate([[5]], THREE, policy, lambda prompt: see)
    except (Refused, GateClosed) as error:
        return type(error).__name__
    sample = answer.groups[0][0]
    spans = [span.version for span in sample.spans for _ in range(span.start, span.end)]
    assert sample.token_ids == spans == [token for token, _ in heard] == [version for _, version in heard]
    assert all(policy.accepts(version) for version in spans)
    assert (answer.version_start, answer.version_end) == (spans[0], spans[-1])
    # Versions of run A are 3 and more, those of run B less.
    assert answer.run_id == (A if spans[0] >= 3 else B)
    assert all((version >= 3) == (spans[0] >= 3) for version in spans)
    return "served"


async def move(service: Service, version: int, run_id: str | None = None, *, end: str = "swap") -> str:
    engine = service.engine

    async def install() -> None:
        await engine.pause()
        await asyncio.sleep(0)
        if end == "fail":
            raise RuntimeError("half a state")
        if end == "undo":
            await engine.resume()
            raise CommitUndone("the engine refused it")
        await engine.swap(SimpleNamespace(version=version), frozenset())  # type: ignore[arg-type]
        await engine.resume()

    try:
        if run_id is None:
            await service.gate.commit(version, install)
        else:
            await service.gate.switch(run_id, version, install)
    except RuntimeError:
        await engine.close()
        return "failed"
    except CommitUndone:
        return "undone"
    except GateClosed:
        return "closed"
    return "moved"


async def settle(service: Service, work: list[asyncio.Future[str]]) -> list[str]:
    """Every request and move must end by itself: served, refused, or cancelled."""
    results = await asyncio.gather(*work, return_exceptions=True)
    assert service.held == 0
    assert service.gate.active == 0
    assert service.gate.waiting == []
    assert service.gate.state.pending is None
    assert asyncio.get_running_loop().time() == 0.0, "somebody slept until a timer instead of being woken"
    ends = []
    for result in results:
        if isinstance(result, BaseException):
            assert isinstance(result, asyncio.CancelledError) or "closed" in str(result)
            ends.append("cancelled" if isinstance(result, asyncio.CancelledError) else "engine")
        else:
            ends.append(result)
    return ends


@pytest.mark.parametrize("mode", ["in_place", "quiesce"])
def test_swaps_under_every_schedule(mode: CommitMode) -> None:
    seen = set()

    async def program() -> None:
        service = island(mode).service

        async def two() -> str:
            return await move(service, 4) + await move(service, 5)

        work = [ask(service, ANY), ask(service, exact(3)), two(), ask(service, at_least(5)), ask(service, exact(4))]
        ends = await settle(service, [asyncio.ensure_future(each) for each in work])
        assert ends[0] == ends[3] == "served"
        assert ends[2] == "movedmoved"
        assert service.gate.version == 5
        seen.add(tuple(ends))

    assert every_schedule(program, delays=2) > 500
    assert {ends[1] for ends in seen} == {"served", "Refused"}


def test_a_failing_swap_under_every_schedule() -> None:
    seen = set()

    async def program() -> None:
        service = island("in_place").service
        work = [ask(service, ANY), move(service, 4, end="fail"), ask(service, at_least(4)), ask(service, exact(3))]
        ends = await settle(service, [asyncio.ensure_future(each) for each in work])
        assert ends[1] == "failed"
        assert ends[2] == "GateClosed"
        assert await ask(service, ANY) == "GateClosed"
        seen.add(tuple(ends))

    assert every_schedule(program, delays=2) > 200
    assert {ends[0] for ends in seen} >= {"served", "engine"}


def test_an_undone_swap_under_every_schedule() -> None:
    async def program() -> None:
        service = island("in_place").service

        async def moves() -> str:
            return await move(service, 4, end="undo") + await move(service, 5)

        work = [ask(service, ANY), moves(), ask(service, at_least(4)), ask(service, exact(4))]
        ends = await settle(service, [asyncio.ensure_future(each) for each in work])
        assert ends == ["served", "undonemoved", "served", "Refused"]

    assert every_schedule(program, delays=2) > 200


@pytest.mark.parametrize("mode", ["in_place", "quiesce"])
def test_cancellations_under_every_schedule(mode: CommitMode) -> None:
    seen = set()

    async def program() -> None:
        service = island(mode).service
        work = [ask(service, exact(3)), ask(service, at_least(4)), move(service, 4), ask(service, ANY)]
        tasks = [asyncio.ensure_future(each) for each in work]

        async def cancel() -> None:
            for victim in (0, 1, 2):
                await asyncio.sleep(0)
                tasks[victim].cancel()

        canceller = asyncio.ensure_future(cancel())
        await asyncio.wait(tasks)
        await canceller
        ends = await settle(service, tasks)
        assert ends[3] in ("served", "GateClosed")
        if service.gate.state.closed is None:
            assert await ask(service, ANY) == "served"
        seen.add(tuple(ends))

    assert every_schedule(program, delays=2) > 200
    assert len(seen) > 2


@pytest.mark.parametrize("mode", ["in_place", "quiesce"])
def test_a_run_switch_under_every_schedule(mode: CommitMode) -> None:
    seen = set()

    async def program() -> None:
        service = island(mode).service
        policies = [ANY, at_least(3), at_least(4), exact(1, run_id=B)]
        work = [ask(service, policy) for policy in policies]

        async def moves() -> str:
            return await move(service, 1, B)

        tasks = [asyncio.ensure_future(each) for each in (*work[:3], moves(), work[3])]
        ends = await settle(service, tasks)
        assert ends[0] == "served"
        assert ends[1] in ("served", "Refused")
        assert ends[2] == "Refused"
        assert (service.served_run, service.gate.version) == (B, 1)
        seen.add(tuple(ends))

    assert every_schedule(program, delays=2) > 200
    assert {ends[1] for ends in seen} == {"served", "Refused"}
    assert {ends[4] for ends in seen} >= {"served"}


def test_a_lost_wake_up_would_be_noticed(monkeypatch: Any) -> None:
    async def program() -> None:
        service = island("in_place").service
        waiter = asyncio.ensure_future(ask(service, at_least(4)))
        await asyncio.sleep(0)
        monkeypatch.setattr(service.gate, "_notify", lambda: None)
        await move(service, 4)
        await settle(service, [waiter])

    with pytest.raises(AssertionError, match="woken"):
        run_once(program, ())
