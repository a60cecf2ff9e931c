"""The gate: every interleaving of admissions, departures and a commit keeps a ticket's policy satisfied."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sprawl.rollout.gate import CommitMode, Gate, GateClosed, GateState, Refused, Rewind
from sprawl.rollout.wire import VersionPolicy
from tests.rollout.support import go, until

ANY = VersionPolicy()
EXACT_0 = VersionPolicy(exact_version=0)
EXACT_1 = VersionPolicy(exact_version=1)
EXACT_3 = VersionPolicy(exact_version=3)

policies = st.builds(
    lambda low, width, kind: (
        VersionPolicy(exact_version=low)
        if kind == "exact"
        else VersionPolicy(min_version=low, max_version=low + width if kind == "range" else None)
    ),
    st.integers(0, 4),
    st.integers(0, 2),
    st.sampled_from(["exact", "range", "open"]),
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), policies),
        st.tuples(st.just("leave"), st.integers(0, 20)),
        st.tuples(st.sampled_from(["propose", "commit", "begin", "finish", "overdue"]), st.none()),
    ),
    max_size=60,
)


@given(mode=st.sampled_from(["in_place", "quiesce"]), script=actions)
def test_no_interleaving_breaks_a_ticket(mode: CommitMode, script: list) -> None:
    state = GateState(mode)
    tickets = []
    for action, argument in script:
        if action == "admit":
            if state.verdict(argument) == "admit":
                assert not state.committing
                tickets.append(state.admit(argument))
                assert argument.accepts(tickets[-1].version)
        elif action == "leave" and tickets:
            state.leave(tickets.pop(argument % len(tickets)))
        elif action == "propose" and state.pending is None:
            state.propose(0 if state.version is None else state.version + 1)
        elif action == "begin" and state.may_commit() and not state.committing:
            if mode == "quiesce":
                assert not tickets
            state.begin()
        elif action == "finish" and state.committing:
            state.finish()
        elif action == "overdue" and state.pending is not None:
            state.overdue = True
        # Whatever happened: the version in service is one that every active ticket accepts.
        if state.version is not None:
            assert all(ticket.policy.accepts(state.version) for ticket in tickets)


def serving(version: int, mode: CommitMode = "in_place", patience_s: float = 5.0) -> Gate:
    gate = Gate(mode, asyncio.Event(), patience_s=patience_s)
    gate.state.version = version
    return gate


async def nothing() -> None:
    pass


def test_in_place_carries_open_requests_over_and_waits_for_exact_ones() -> None:
    async def scenario() -> None:
        gate = serving(0)
        async with gate.admit(ANY, 1):
            await gate.commit(1, nothing)
            assert gate.version == 1
        exact = gate.admit(EXACT_1, 1)
        await exact.__aenter__()
        commit = asyncio.ensure_future(gate.commit(2, nothing))
        await asyncio.sleep(0.02)
        assert not commit.done()
        async with gate.admit(ANY, 1) as ticket, gate.admit(EXACT_1, 1):
            assert ticket.version == 1
        await exact.__aexit__(None, None, None)
        await commit
        assert gate.version == 2

    go(scenario())


def test_quiesce_sends_new_requests_to_the_new_version() -> None:
    async def scenario() -> None:
        gate = serving(0, "quiesce")
        old = gate.admit(ANY, 1)
        await old.__aenter__()
        commit = asyncio.ensure_future(gate.commit(1, nothing))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(gate.admit(ANY, 5).__aenter__())
        await asyncio.sleep(0.02)
        assert not commit.done()
        assert not late.done()
        await old.__aexit__(None, None, None)
        await commit
        assert (await late).version == 1

    go(scenario())


def test_a_stream_of_old_requests_cannot_starve_a_commit() -> None:
    async def scenario() -> int:
        gate = serving(0, patience_s=0.1)
        refused = []

        async def old_requests() -> None:
            while gate.version == 0:
                try:
                    async with gate.admit(EXACT_0, 1):
                        await asyncio.sleep(0.005)
                except Refused as error:
                    refused.append(error.answer)
                    await asyncio.sleep(0.005)

        streams = [asyncio.ensure_future(old_requests()) for _ in range(3)]
        await until(lambda: gate.active == 3)
        started = time.monotonic()
        await gate.commit(1, nothing)
        assert 0.09 < time.monotonic() - started < 2
        await asyncio.gather(*streams)
        assert all(answer.retryable for answer in refused if answer.applied == 0)
        return len(refused)

    assert go(scenario()) > 0


def test_nothing_is_admitted_while_weights_change() -> None:
    async def scenario() -> None:
        gate = serving(0)
        inside, leave = asyncio.Event(), asyncio.Event()

        async def install() -> None:
            inside.set()
            await leave.wait()

        commit = asyncio.ensure_future(gate.commit(1, install))
        await inside.wait()
        request = asyncio.ensure_future(gate.admit(ANY, 5).__aenter__())
        stale = asyncio.ensure_future(gate.admit(EXACT_0, 5).__aenter__())
        await asyncio.sleep(0.02)
        assert not request.done()
        leave.set()
        await commit
        assert (await request).version == 1
        with pytest.raises(Refused) as caught:
            await stale
        assert not caught.value.answer.retryable

    go(scenario())


def test_refusals_say_what_a_client_needs() -> None:
    async def scenario() -> None:
        gate = serving(3)
        with pytest.raises(Refused) as passed:
            await gate.admit(VersionPolicy(max_version=2), 1).__aenter__()
        assert passed.value.answer.model_dump(exclude={"message"}) == {
            "type": "WeightVersionNotReady",
            "target_version": 2,
            "applied": 3,
            "retryable": False,
        }
        with pytest.raises(Refused) as behind:
            await gate.admit(VersionPolicy(min_version=7), 0.02).__aenter__()
        assert (behind.value.answer.target_version, behind.value.answer.retryable) == (7, True)
        assert gate.waiting == []
        fresh = Gate("in_place", asyncio.Event())
        with pytest.raises(GateClosed):
            await fresh.admit(ANY, 0.02).__aenter__()

    go(scenario())


def test_a_failed_install_closes_the_gate() -> None:
    async def scenario() -> None:
        gate = serving(0)
        waiter = asyncio.ensure_future(gate.admit(EXACT_1, 5).__aenter__())
        await until(lambda: gate.waiting)

        async def install() -> None:
            raise RuntimeError("half a state")

        with pytest.raises(RuntimeError):
            await gate.commit(1, install)
        with pytest.raises(GateClosed, match="half a state"):
            await waiter
        with pytest.raises(GateClosed):
            await gate.admit(ANY, 5).__aenter__()

    go(scenario())


def test_a_cancelled_waiter_leaves_no_demand() -> None:
    async def scenario() -> None:
        gate = serving(0)
        waiter = asyncio.ensure_future(gate.admit(EXACT_1, 5).__aenter__())
        await until(lambda: gate.waiting)
        assert gate.wake.is_set()
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert gate.waiting == []

    go(scenario())


def test_a_cancellation_that_meets_a_wake_up_is_not_lost() -> None:
    async def scenario() -> None:
        gate = serving(0)
        waiter = asyncio.ensure_future(gate.admit(EXACT_1, 5).__aenter__())
        await until(lambda: gate.waiting)
        gate._notify()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    go(scenario())


def test_a_version_comes_once_and_in_order() -> None:
    async def scenario() -> None:
        gate = serving(3)
        gate.state.run_id = "run-a"
        for version in (3, 2):
            with pytest.raises(Rewind, match=f"version {version} does not come after version 3"):
                await gate.commit(version, nothing)
            with pytest.raises(Rewind):
                await gate.switch("run-a", version, nothing)
        async with gate.admit(EXACT_3, 1):
            pass
        await gate.switch("run-a", 4, nothing)
        await gate.switch("run-b", 0, nothing)
        assert (gate.run_id, gate.version) == ("run-b", 0)

    go(scenario())


def test_a_run_switch_drains_and_strands_nobody() -> None:
    async def scenario() -> None:
        gate = serving(3)
        gate.state.run_id = "run-a"
        running = gate.admit(ANY, 1)
        await running.__aenter__()
        old = asyncio.ensure_future(gate.admit(VersionPolicy(min_version=4), 5).__aenter__())
        await until(lambda: gate.waiting)
        switch = asyncio.ensure_future(gate.switch("run-b", 0, nothing))
        with pytest.raises(Refused, match="goes over to run run-b") as caught:
            await old
        assert caught.value.answer.retryable
        with pytest.raises(Refused, match="run run-a is not served here"):
            await gate.admit(VersionPolicy(run_id="run-a"), 5).__aenter__()
        new = asyncio.ensure_future(gate.admit(VersionPolicy(exact_version=0, run_id="run-b"), 5).__aenter__())
        open_ = asyncio.ensure_future(gate.admit(ANY, 5).__aenter__())
        await asyncio.sleep(0.02)
        assert not switch.done()
        assert not new.done()
        assert not open_.done()
        await running.__aexit__(None, None, None)
        await switch
        assert {((await t).run_id, (await t).version) for t in (new, open_)} == {("run-b", 0)}

    go(scenario())


def test_nothing_is_installed_behind_a_closed_gate() -> None:
    async def scenario() -> None:
        gate = serving(0)
        gate.close("this island is draining")
        with pytest.raises(GateClosed):
            await gate.commit(1, nothing)
        assert gate.version == 0

    go(scenario())
