"""The robust slope against its definition, and the test for a trend against chance."""

from __future__ import annotations

import random

import pytest

from sprawl.control.trend import mann_kendall, relative_rise, theil_sen


def test_a_line_has_its_slope_whatever_a_few_outliers_say() -> None:
    xs = [float(x) for x in range(20)]
    ys = [3.0 - 0.25 * x for x in xs]
    assert theil_sen(xs, ys) == pytest.approx(-0.25)
    ys[4], ys[11], ys[17] = 1e6, -1e6, 1e6
    assert theil_sen(xs, ys) == pytest.approx(-0.25, abs=0.05)


def test_uneven_steps_count_by_their_distance() -> None:
    assert theil_sen([0, 1, 10], [0, 2, 20]) == pytest.approx(2.0)
    assert theil_sen([5, 5], [0, 1]) == 0.0


def test_the_score_of_a_rising_series_is_that_of_the_closed_form() -> None:
    # n = 10: S = 45, variance = 10 * 9 * 25 / 18 = 125.
    assert mann_kendall([float(x) for x in range(10)]) == pytest.approx(44 / 125**0.5)
    assert mann_kendall([float(-x) for x in range(10)]) == pytest.approx(-44 / 125**0.5)
    assert mann_kendall([1.0] * 10) == 0.0


def test_noise_seldom_passes_for_a_trend() -> None:
    noise = random.Random(3)
    scores = [mann_kendall([noise.gauss(0, 1) for _ in range(20)]) for _ in range(400)]
    assert sum(abs(score) > 3 for score in scores) <= 4
    assert sum(score > 0 for score in scores) == pytest.approx(200, abs=50)


def test_rise_is_relative_to_the_level() -> None:
    xs = [float(x) for x in range(11)]
    assert relative_rise(xs, [10 + 0.1 * x for x in xs], 20) == pytest.approx(2 / 10.5)
    assert relative_rise(xs, [0.0] * 11, 20) == 0.0
