"""When fires are, with those asked for between the regular ones."""

from __future__ import annotations

from sprawl.anchor.forecast import checkpoints_for, checkpoints_needed
from sprawl.anchor.schedule import fires_before, open_requests
from sprawl.config import AnchorConfig


def test_without_requests_fires_are_every_c_steps() -> None:
    assert fires_before(67, (), 20, 20) == [60, 40]
    assert fires_before(20, (), 20) == []
    assert fires_before(21, (), 20) == [20]
    assert open_requests((), 40, 20) == []


def test_a_requested_fire_comes_before_the_next_regular_one() -> None:
    assert open_requests([30, 50, 35], 40, 20) == [30, 35]
    assert open_requests([30, 50], 60, 20) == [50]
    assert fires_before(31, (30, 50), 20, 20) == [30]
    assert fires_before(61, (30, 50), 20, 20) == [60, 50, 40, 30]
    assert fires_before(60, (30, 50), 20, 50) == []


def test_checkpoints_of_every_fire_that_can_be_asked_for_are_kept() -> None:
    for forecast in ("secant", "window", "fit4", "stale"):
        config = AnchorConfig(every=20, lag=20, forecast=forecast)
        for regular in range(20, 100, 20):
            kept = checkpoints_needed(regular, 100, config, grid=10)
            for fire in range(regular - 10, 101, 10):
                assert kept >= set(checkpoints_for(fire, config))
                assert max(checkpoints_for(fire, config)) <= max(0, fire - config.lag)
            assert kept >= checkpoints_needed(regular, 100, config)
