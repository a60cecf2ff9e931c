"""When fires are, with those asked for between the regular ones."""

from __future__ import annotations

from sprawl.anchor.forecast import checkpoints_for
from sprawl.anchor.schedule import fire_before, fires_before, next_fire, open_fires
from sprawl.config import AnchorConfig


def test_without_requests_fires_are_every_c_steps() -> None:
    assert next_fire(set(), (), 20) == 20
    assert next_fire({20, 40}, (), 20) == 60
    assert fires_before(67, (), 20, 20) == [60, 40]
    assert fires_before(20, (), 20, 0) == []
    assert fires_before(21, (), 20, 0) == [20]


def test_a_requested_fire_comes_before_the_next_regular_one() -> None:
    assert next_fire({20}, (30,), 20) == 30
    assert next_fire({20, 30}, (30,), 20) == 40
    assert next_fire({20}, (50,), 20) == 40
    assert fires_before(31, (30, 50), 20, 20) == [30]
    assert fires_before(61, (30, 50), 20, 20) == [60, 50, 40, 30]
    assert fire_before(30, {20, 40}) == 20
    assert fire_before(20, {20}) is None


def test_what_can_still_be_asked_for_sees_nothing_newer_than_its_contract() -> None:
    config, grid = AnchorConfig(every=20, lag=20), 10
    assert list(open_fires(20, 40, 20, grid)) == [10, 20, 30, 40]
    assert list(open_fires(40, 45, 20, grid)) == [30, 40]
    assert list(open_fires(40, 85, 20, 20)) == [40, 60, 80]
    for regular in range(40, 200, 20):
        for fire in open_fires(regular, regular, 20, grid):
            assert max(checkpoints_for(fire, config)) <= fire - config.lag
            assert all(step % grid == 0 for step in checkpoints_for(fire, config))
