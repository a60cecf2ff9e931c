"""Forecasts against their closed forms and an obvious implementation, and which checkpoints they read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sprawl.anchor.forecast import (
    checkpoints_for,
    checkpoints_needed,
    factors,
    fire_due,
    last_fire,
    project,
    replayed_step,
    secant,
)
from sprawl.config import AnchorConfig

MOVING = ("secant", "window", "fit4")
Path = Callable[[int], torch.Tensor]


def forecast(step: int, config: AnchorConfig, path: Path) -> torch.Tensor:
    """What a fire at `step` would replay at, for weights that are `path` at every checkpoint."""
    used = checkpoints_for(step, config)
    older = [{"w": path(at)} for at in used[1:]]
    return project({"w": path(used[0])}, zip(factors(step, used, config), older, strict=True))["w"]


def obvious(step: int, config: AnchorConfig, path: Path) -> np.ndarray:
    """The same in float64, straight from the definitions."""
    newest = max(0, step - config.lag)
    there = list(range(newest % config.every, newest + 1, config.every))
    if config.forecast == "stale" or len(there) == 1:
        return path(newest).double().numpy()
    if config.forecast == "fit4":
        points = there[-4:]
        line = np.polyfit(np.array(points) - newest, np.stack([path(at).double().numpy() for at in points]), 1)
        full = line[0] * (step - newest) + line[1]
    else:
        first = there[-2] if config.forecast == "secant" else there[-min(config.window, len(there))]
        slope = (path(newest).double() - path(first).double()) / (newest - first)
        full = (path(newest).double() + (step - newest) * slope).numpy()
    now = path(newest).double().numpy()
    return now + config.strength * (full - now)


def anchor(**settings: object) -> AnchorConfig:
    return AnchorConfig.model_validate(settings)


@settings(deadline=None)
@given(
    st.sampled_from(("secant", "window", "fit4", "stale")),
    st.integers(1, 12),
    st.integers(1, 8),
    st.sampled_from((1, 2, 3, 5, 20)),
    st.integers(2, 7),
    st.floats(0, 2),
)
def test_every_forecast_is_its_definition(
    kind: str, fire: int, lag: int, unit: int, window: int, strength: float
) -> None:
    every = 2 * unit
    config = anchor(every=every, lag=lag * unit, forecast=kind, window=window, strength=strength)
    generator = torch.Generator().manual_seed(fire)
    trajectory = torch.randn(fire * every + 1, 5, generator=generator)
    found = forecast(fire * every, config, trajectory.__getitem__)
    assert torch.allclose(
        found.double(), torch.from_numpy(obvious(fire * every, config, trajectory.__getitem__)), rtol=2e-5, atol=2e-4
    )


@pytest.mark.parametrize("kind", MOVING)
@pytest.mark.parametrize("fire", [2, 3, 4, 5, 9])
def test_a_linear_trajectory_is_continued_exactly(kind: str, fire: int) -> None:
    start, slope = torch.tensor([1.0, -3.0, 0.25]), torch.tensor([0.5, 2.0, -0.125])

    def path(at: int) -> torch.Tensor:
        return start + slope * at

    assert torch.equal(forecast(20 * fire, anchor(forecast=kind), path), path(20 * fire))
    half = forecast(20 * fire, anchor(forecast=kind, strength=0.5), path)
    assert torch.equal(half, path(20 * fire - 10))  # halfway between t - K and t
    assert torch.equal(forecast(20 * fire, anchor(forecast=kind, strength=0.0), path), path(20 * fire - 20))


def test_closed_forms() -> None:
    assert secant({"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([1.0, 2.0])}, 0.5)["w"].tolist() == [4.0, 0.5]
    assert factors(40, [20, 0], anchor()) == [1.0]
    assert factors(80, [60, 40], anchor(lag=20, strength=0.74)) == [0.74]
    assert factors(120, [80, 60], anchor(lag=40)) == [2.0]
    assert factors(100, [80, 20], anchor(forecast="window")) == [1 / 3]
    # The line through four equidistant points, one step on: -1/2, 0, 1/2, 1 from the oldest to the newest.
    assert factors(100, [80, 60, 40, 20], anchor(forecast="fit4")) == [-0.5, 0.0, 0.5]


def test_least_squares_averages_what_a_secant_follows() -> None:
    """A wobble around a line moves the four-checkpoint fit less than the secant."""
    wobble = {20: 0.0, 40: 1.0, 60: -1.0, 80: 1.0}
    fit, two = (
        forecast(100, anchor(forecast=kind), lambda at: torch.tensor([at + wobble[at]])) for kind in ("fit4", "secant")
    )
    assert abs(fit.item() - 100) < abs(two.item() - 100)


def test_schedule_and_staleness_contract() -> None:
    assert [step for step in range(101) if fire_due(step, 20)] == [20, 40, 60, 80, 100]
    assert [last_fire(step, 20) for step in (0, 19, 20, 39, 41)] == [0, 0, 20, 20, 40]
    for every, lag in ((10, 20), (20, 40), (5, 5), (20, 20)):
        for kind in (*MOVING, "stale"):
            config = anchor(every=every, lag=lag, forecast=kind)
            for step in range(every, 200, every):
                used = checkpoints_for(step, config)
                assert used == sorted(set(used), reverse=True)
                assert used[0] == max(0, step - lag)  # the base model is everybody's from the start
                assert used[-1] >= 0


def test_checkpoints_grow_to_what_a_forecast_wants() -> None:
    fires = (20, 40, 60, 80, 100, 120)
    read = {kind: [checkpoints_for(step, anchor(forecast=kind)) for step in fires] for kind in (*MOVING, "stale")}
    assert read["stale"] == [[0], [20], [40], [60], [80], [100]]
    assert read["secant"] == [[0], [20, 0], [40, 20], [60, 40], [80, 60], [100, 80]]
    assert read["window"] == [[0], [20, 0], [40, 0], [60, 0], [80, 20], [100, 40]]
    assert read["fit4"] == [[0], [20, 0], [40, 20, 0], [60, 40, 20, 0], [80, 60, 40, 20], [100, 80, 60, 40]]
    assert [checkpoints_for(step, anchor(replay="matching")) for step in fires] == read["stale"]


def test_checkpoints_needed_are_those_of_all_fires_to_come() -> None:
    # The window's fire at 80 reads 60 and 0; 20 and 40 are read by the two after it.
    assert checkpoints_needed(80, 120, anchor(forecast="window")) == {60, 0, 80, 20, 100, 40}
    assert checkpoints_needed(80, 80, anchor(forecast="window")) == {60, 0}
    assert checkpoints_needed(100, 120, anchor(forecast="fit4")) == {20, 40, 60, 80, 100}
    assert checkpoints_needed(100, 100, anchor(forecast="stale")) == {80}
    assert checkpoints_needed(120, 110, anchor()) == set()


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_matching_replay_takes_what_the_stale_weights_sampled(staleness: int) -> None:
    """Step s trains on what version max(0, s - 1 - staleness) sampled."""
    for every, lag in ((20, 20), (10, 20), (3, 3), (1, 5)):
        config = anchor(replay="matching", every=every, lag=lag)
        for step in range(every, 100, every):
            replayed = replayed_step(step, config, staleness)
            assert replayed <= step
            assert [max(0, replayed - 1 - staleness)] == checkpoints_for(step, config)
    assert replayed_step(40, anchor(), staleness=1) == 40
