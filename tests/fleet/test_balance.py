"""What is measured, and how many islands it asks for."""

from __future__ import annotations

import pytest

from sprawl.errors import ConfigError
from sprawl.fleet.balance import Balance, effective_islands, measure, recent_steps, wanted_islands
from sprawl.fleet.policy import pause
from sprawl.fleet.settings import FleetSettings, load_settings
from tests.fleet.support import World, step_record

SETTINGS = FleetSettings()


def balance(idle: float, load: float, islands: float, steps: int = 8) -> Balance:
    return Balance(steps, 60.0, idle, load, 0.0, 1.0, islands)


def test_a_batch_that_lies_and_a_trainer_that_waits() -> None:
    lies = measure([step_record(1, 100.0, wait_s=0, rollout_s=20, busy_s=50, islands=2)], 1)
    assert lies is not None
    assert (lies.idle_share, lies.load, lies.queue_age_s, lies.islands) == (0.0, 0.4, 30.0, 2.0)
    waits = measure([step_record(1, 100.0, wait_s=50, rollout_s=100, busy_s=50, islands=2)], 1)
    assert waits is not None
    assert (waits.idle_share, waits.load, waits.queue_age_s) == (0.5, 2.0, 0.0)
    two_ahead = measure([step_record(1, 100.0, wait_s=0, rollout_s=80, busy_s=50, islands=2)], 2)
    assert two_ahead is not None
    assert two_ahead.load == 0.8
    assert measure([], 1) is None


def test_an_island_that_came_half_way_counts_for_what_it_did() -> None:
    assert effective_islands({"a": 8, "b": 8}) == 2
    assert 1 < effective_islands({"a": 15, "b": 1}) < 1.2
    assert effective_islands({}) == 1


@pytest.mark.parametrize(
    ("found", "current", "wanted"),
    [
        (None, 3, 3),
        (balance(0.5, 2.0, 2, steps=1), 2, 2),  # not enough evidence
        (balance(0.5, 2.0, 2), 2, 3),  # by half at most, although five are needed
        (balance(0.5, 2.0, 4), 4, 6),
        (balance(0.5, 2.0, 4), 12, 12),  # those that are on their way will do
        (balance(0.12, 0.8, 4), 4, 4),  # it waits because batches vary: more islands do not mend that
        (balance(0.05, 1.05, 4), 4, 4),  # a little
        (balance(0.0, 0.7, 6), 6, 6),  # between the bounds
        (balance(0.0, 0.3, 6), 6, 5),  # three are needed: half of what is too much
        (balance(0.0, 0.1, 12), 12, 7),
        (balance(0.0, 0.55, 2), 2, 2),  # one could not do it
    ],
)
def test_how_many_are_wanted(found: Balance | None, current: int, wanted: int) -> None:
    assert wanted_islands(found, current, SETTINGS)[0] == wanted


def test_growing_and_shrinking_never_undo_each_other() -> None:
    """Whatever the load: the number that growing ends at is one that shrinking leaves alone, and the other way."""
    for work in range(1, 200):
        for start in (1, 30):
            current, seen = start, []
            for _ in range(60):
                load = work / 10 / current
                idle = max(0.0, 1 - 1 / load)
                current = max(1, wanted_islands(balance(idle, load, current), current, SETTINGS)[0])
                seen.append(current)
            assert seen[-10:] == [current] * 10, work
            steps = [b - a for a, b in zip([start, *seen], seen, strict=False) if a != b]
            assert all(step > 0 for step in steps) or all(step < 0 for step in steps), work


def test_the_newest_steps_are_read_and_no_others() -> None:
    world = World()
    for _ in range(12):
        world.step(wait_s=1, rollout_s=1, islands=1)
    assert [record.step for record in recent_steps(world.ledger, 3)] == [10, 11, 12]


def test_pauses_double_up_to_a_limit() -> None:
    settings = FleetSettings(grow_cooldown_s=60, backoff_limit_s=500)
    assert [pause(failures, settings) for failures in range(6)] == [60, 120, 240, 480, 500, 500]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["max_island=3"], "unknown key 'max_island', did you mean 'max_islands'?"),
        (["min_islands=5"], "have to ascend"),
        (["max_hourly_cost=9"], "needs island_hourly_cost"),
        (["evidence=30"], "above window"),
        (["load_low=0.9"], "have to ascend"),
    ],
)
def test_settings_that_make_no_sense_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match="fleet settings") as error:
        load_settings(None, overrides)
    assert message in str(error.value)


def test_the_cap_on_cost_is_a_number_of_islands() -> None:
    settings = load_settings(None, ["island_hourly_cost=2.5", "max_hourly_cost=10", "max_islands=16"])
    assert settings.affordable == 4
    assert FleetSettings(max_islands=6).affordable == 6
