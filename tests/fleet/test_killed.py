"""A controller that is killed before or after any of its effects leaves nothing that the next one, or reap, does not
find. Its effects are all it does to the board and to the cloud, both of which outlive it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sprawl.fleet.controller import Controller
from sprawl.fleet.reap import reap
from sprawl.fleet.settings import FleetSettings
from tests.fleet.support import RUN, STEPS, World

EFFECTS = {"create", "put", "delete", "start_island", "drain_island", "cancel_island"}
SETTINGS = FleetSettings(
    start_islands=2, max_islands=4, grow_cooldown_s=0, shrink_cooldown_s=0, evidence=1, window=2, appear_limit_s=60
)


class Killed(BaseException):
    """Not an Exception: nothing catches a kill -9."""


class Mortal:
    """Passes everything on to `inner`; the effect number `at` of all that share `count` kills, before or after it."""

    def __init__(self, inner: Any, count: list[int], at: int | None, after: bool) -> None:
        self._inner, self._count, self._at, self._after = inner, count, at, after

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return self._lethal(value) if name in EFFECTS else value

    def _lethal(self, effect: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._count[0] += 1
            dies = self._count[0] == self._at
            if dies and not self._after:
                raise Killed
            result = effect(*arguments)
            if dies:
                raise Killed
            return result

        return call


def life(world: World, at: int | None, after: bool) -> int:
    """A run's fleet grows, loses islands, shrinks and ends, under one controller; returns the effects it had."""
    count = [0]
    store, cloud = (Mortal(part, count, at, after) for part in (world.store, world.cloud))
    controller = Controller(store, RUN, cloud, world.settings, now=lambda: world.cloud.now)

    def pass_time(seconds: float) -> None:
        for _ in range(round(seconds / 10)):
            world.cloud.advance(10)
            controller.look()

    controller.look()
    pass_time(40)
    world.cloud.advance(10)
    world.step(wait_s=10, rollout_s=20)
    controller.look()  # grows
    pass_time(30)
    world.cloud.mute.add("island-0")
    pass_time(200)  # replaced
    for _ in range(2):
        world.cloud.advance(20)
        world.step(wait_s=0, rollout_s=1)
        controller.look()  # shrinks
    pass_time(30)
    world.steps = STEPS - 1
    world.step(wait_s=0, rollout_s=1)
    world.event("finish", STEPS)
    pass_time(30)
    reap(store, RUN, cloud, drain_s=20, now=lambda: world.cloud.now, sleep=world.cloud.advance)
    return count[0]


def world() -> World:
    return World(SETTINGS, appear_s=15.0, boot_s=5.0, drain_s=8.0, end_s=4.0, settle_s=30.0)


TOTAL = life(world(), None, False)


def test_the_undisturbed_life_has_every_kind_of_effect() -> None:
    alive = world()
    assert life(alive, None, False) == TOTAL >= 25
    assert alive.cloud.there == {}
    kinds = {event.kind for event in alive.ledger.events()}
    assert kinds == {"island_lost", "finish"}
    assert any("no heartbeat" in event.message for event in alive.ledger.events())


@pytest.mark.parametrize("after", [False, True])
def test_reap_after_a_kill_anywhere_leaves_nothing(after: bool) -> None:
    for at in range(1, TOTAL + 1):
        killed = world()
        with pytest.raises(Killed):
            life(killed, at, after)
        reap(killed.store, RUN, killed.cloud, now=lambda w=killed: w.cloud.now, sleep=killed.cloud.advance)
        assert killed.cloud.there == {}, at
        for _ in range(10):  # nor does anything come back
            killed.cloud.advance(10)
            killed.look()
        assert killed.cloud.there == {}, at


@pytest.mark.parametrize("after", [False, True])
def test_the_next_controller_goes_on_after_a_kill_anywhere(after: bool) -> None:
    for at in range(1, TOTAL + 1):
        killed = world()
        with pytest.raises(Killed):
            life(killed, at, after)
        head = killed.controller().log.head()
        killed.cloud.mute.clear()
        killed.settle(400, every=20)
        islands = set(killed.cloud.there)
        if head is not None and (head.state == "closed" or killed.steps == STEPS):
            assert islands == set(), at
        else:
            decided = killed.controller().log.head()
            assert decided is not None
            assert islands == set(decided.islands), at
            assert killed.cloud.serving == decided.target >= 1, at


def test_reap_that_is_killed_is_finished_by_the_next_one() -> None:
    for at in range(1, 6):
        killed = world()
        killed.settle(60)
        count = [0]
        store, cloud = (Mortal(part, count, at, True) for part in (killed.store, killed.cloud))
        clock = {"now": lambda w=killed: w.cloud.now, "sleep": killed.cloud.advance}
        try:
            reap(store, RUN, cloud, **clock)
        except Killed:
            reap(killed.store, RUN, killed.cloud, **clock)
        assert killed.cloud.there == {}
        assert killed.ledger.islands() == []
