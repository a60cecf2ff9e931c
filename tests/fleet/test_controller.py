"""A fleet from its first look to its end, against a cloud that takes time and loses machines."""

from __future__ import annotations

import pytest

from sprawl.board.fleet_log import FleetLog
from sprawl.errors import SprawlError
from sprawl.fleet.reap import reap
from sprawl.fleet.settings import FleetSettings
from tests.fleet.support import RUN, STEPS, World


def names(world: World) -> set[str]:
    return set(world.cloud.there)


def test_it_begins_with_a_few_and_a_second_look_changes_nothing() -> None:
    world = World()
    look = world.look()
    assert (look.target, look.started, look.open) == (2, ("island-0", "island-1"), True)
    again = world.look()
    assert again.started == ()
    world.settle()
    assert names(world) == {"island-0", "island-1"}
    head = FleetLog(world.store, RUN).head()
    assert head is not None
    assert all(order.seen for order in head.islands.values())


def test_it_grows_when_the_trainer_waits_and_shrinks_when_islands_lie_idle() -> None:
    world = World()
    world.settle(20)
    for _ in range(8):
        world.cloud.advance(30)
        world.step(wait_s=10, rollout_s=20)  # half of every step
        world.look()
    grown = world.cloud.serving
    assert grown > 3
    for _ in range(60):
        world.cloud.advance(30)
        world.step(wait_s=0, rollout_s=2)
        world.look()
    assert world.cloud.serving == 1  # min_islands
    assert names(world) == {"island-0"}  # the oldest stays


def test_an_island_that_is_not_needed_drains_before_its_machine_goes() -> None:
    world = World(drain_s=20.0)
    world.settle(20)
    world.step(wait_s=0, rollout_s=1)
    for _ in range(3):
        world.cloud.advance(15)
        world.step(wait_s=0, rollout_s=1)
    look = world.look()
    assert look.drained == ("island-1",)
    world.cloud.advance(10)
    world.look()
    assert world.cloud.there["island-1"].phase == "running"  # finishing its requests, not cancelled
    assert world.cloud.serving == 1
    world.settle(30)
    assert names(world) == {"island-0"}
    assert [island.island_id for island in world.ledger.islands()] == ["island-0"]


def test_one_that_does_not_drain_is_cancelled() -> None:
    world = World(drain_s=1e9)
    world.settle(20)
    for _ in range(4):
        world.cloud.advance(15)
        world.step(wait_s=0, rollout_s=1)
    world.look()
    world.settle(world.settings.drain_limit_s + 20)
    assert names(world) == {"island-0"}


def test_what_the_platform_recovers_is_left_to_it_and_what_it_lost_is_replaced() -> None:
    world = World(boot_s=30.0)
    world.settle(60)
    world.cloud.preempt("island-0")
    world.settle(60)
    assert names(world) == {"island-0", "island-1"}
    assert world.cloud.serving == 2
    del world.cloud.there["island-1"]  # its job failed for good
    world.settle(60)
    assert names(world) == {"island-0", "island-2"}
    assert [event.message for event in world.ledger.events()] == ["island-1: its machine is gone"]


def test_a_machine_that_runs_while_its_island_is_silent_is_replaced() -> None:
    world = World()
    world.settle(20)
    world.cloud.mute.add("island-1")
    world.settle(world.settings.lost_after_s - 20)
    assert "island-1" in names(world)
    world.settle(60)
    assert names(world) == {"island-0", "island-2"}
    assert "no heartbeat for" in world.ledger.events()[0].message


def test_islands_that_never_come_up_are_tried_ever_more_slowly() -> None:
    world = World(FleetSettings(grow_cooldown_s=0, start_limit_s=100, backoff_limit_s=1600))
    world.cloud.mute |= {f"island-{number}" for number in range(1000)}
    world.settle(2 * 3600, every=30.0)
    head = FleetLog(world.store, RUN).head()
    assert head is not None
    assert head.failures > 5
    assert head.named < 25  # not one every two minutes for each of the two
    world.cloud.mute.clear()
    world.settle(2000, every=20.0)
    head = FleetLog(world.store, RUN).head()
    assert head is not None
    assert (head.failures, world.cloud.serving) == (0, 2)


def test_a_machine_that_nobody_asked_for_is_cancelled() -> None:
    world = World()
    world.settle(20)
    world.cloud.start_island("island-77")
    world.settle(20)
    assert names(world) == {"island-0", "island-1"}


def test_the_cap_on_cost_counts_islands_that_are_still_leaving() -> None:
    settings = FleetSettings(
        grow_cooldown_s=0, shrink_cooldown_s=0, max_islands=20, island_hourly_cost=2.0, max_hourly_cost=9.0
    )
    world = World(settings, drain_s=60.0)
    world.settle(20)
    most = 0
    for round_ in range(120):
        world.cloud.advance(20)
        busy = round_ % 40 < 20
        world.step(wait_s=30 if busy else 0, rollout_s=40 if busy else 1)
        world.look()
        most = max(most, len(world.cloud.there))
    assert most == 4  # nine dollars


def test_a_cap_that_was_lowered_is_kept_at_once() -> None:
    world = World(FleetSettings(start_islands=6, grow_cooldown_s=0))
    world.settle(30)
    assert world.cloud.serving == 6
    world.settings = world.settings.model_copy(update={"island_hourly_cost": 1.0, "max_hourly_cost": 3.0})
    world.settle(20)
    assert world.cloud.serving == 3


def test_a_run_that_stands_still_is_parked_and_wakes_up() -> None:
    world = World()
    world.settle(20)
    world.step(wait_s=0, rollout_s=8)
    world.settle(world.settings.stall_s + 300, every=60)
    assert world.cloud.there == {}
    world.settle(3600, every=60)
    assert world.cloud.there == {}
    world.ledger.store.put(f"{RUN}/epochs/000001.json", f'{{"at": {world.cloud.now}}}'.encode())  # a trainer is back
    world.settle(60)
    assert world.cloud.serving == 2


def test_a_trainer_that_waits_for_islands_which_cannot_be_had_is_not_given_up() -> None:
    world = World(capacity=0)
    world.settle(3 * world.settings.stall_s, every=60)
    assert len(world.cloud.there) == 2
    world.cloud.capacity = None
    world.settle(30)
    assert world.cloud.serving == 2


def test_it_scales_to_zero_when_the_run_ends() -> None:
    world = World(drain_s=5.0)
    world.settle(20)
    world.steps = STEPS - 1
    world.step(wait_s=0, rollout_s=8)
    world.event("finish", STEPS)
    look = world.look()
    assert (look.target, look.open) == (0, True)
    world.settle(60)
    assert world.cloud.there == {}
    assert not world.look().open


def test_a_decision_on_an_old_state_is_not_carried_out() -> None:
    world = World()
    world.look()
    late = world.controller()
    late.log.head()
    late.log._read = lambda number: None  # type: ignore[method-assign]  # it does not hear of what follows
    FleetLog(world.store, RUN).close("reaped")
    world.cloud.there.clear()
    world.cloud.now += world.settings.appear_limit_s + 1
    look = late.look()
    assert look.superseded
    assert world.cloud.there == {}


def test_reap_ends_what_is_there_and_what_is_still_coming() -> None:
    world = World(appear_s=30.0, end_s=10.0, settle_s=60.0)
    world.look()
    assert world.cloud.machines() == []  # asked for, not yet told of
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        world.cloud.advance(seconds)

    ended = reap(world.store, RUN, world.cloud, now=lambda: world.cloud.now, sleep=sleep)
    assert ended.seen == ("island-0", "island-1")
    assert world.cloud.there == {}
    assert not world.look().open
    assert world.cloud.there == {}


def test_reap_says_so_when_machines_do_not_go() -> None:
    world = World(end_s=1e9)
    world.settle(20)
    with pytest.raises(SprawlError, match=r"2 machines are still there: island-0 \(ending\), island-1 \(ending\)"):
        reap(world.store, RUN, world.cloud, now=lambda: world.cloud.now, sleep=world.cloud.advance)


def test_an_island_that_comes_up_after_the_fleet_was_closed_ends_by_itself() -> None:
    world = World(appear_s=500.0, boot_s=10.0)
    world.look()
    reap(world.store, RUN, world.cloud, now=lambda: world.cloud.now, sleep=world.cloud.advance)
    assert len(world.cloud.there) == 2  # later than any patience
    for _ in range(120):
        world.cloud.advance(10)
    assert world.cloud.there == {}


def test_a_closed_fleet_is_opened_again_for_a_resumed_run() -> None:
    world = World()
    world.settle(20)
    reap(world.store, RUN, world.cloud, now=lambda: world.cloud.now, sleep=world.cloud.advance)
    FleetLog(world.store, RUN).open("resumed", world.cloud.now)
    look = world.look()
    assert look.started == ("island-2", "island-3")  # names are never given twice
