import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sprawl.report.numbers import first_mean, last_mean, line_fit, mean, median, ratio, rolling_mean, wilson
from sprawl.report.style import spread
from sprawl.report.text import duration, megabytes, number, percent, signed


def test_means_leave_out_what_is_not_known():
    assert mean([1.0, None, math.nan, math.inf, 3.0]) == 2.0
    assert median([5.0, None, 1.0, 3.0]) == 3.0
    assert mean([None]) is None
    assert median([]) is None


def test_windows_are_the_first_10_and_the_last_20():
    values = [float(i) for i in range(1, 101)]
    assert first_mean(values) == 5.5
    assert last_mean(values) == 90.5
    assert first_mean([2.0, 4.0]) == last_mean([2.0, 4.0]) == 3.0


def test_windows_without_a_probe_fall_back_to_the_nearest_one():
    values = [None] * 50 + [7.0] + [None] * 49 + [9.0] + [None] * 40
    assert first_mean(values) == 7.0
    assert last_mean(values) == 9.0


def test_line_fit_recovers_a_line_and_needs_two_points():
    assert line_fit([1, 2, 3], [5.0, 7.0, 9.0]) == pytest.approx((2.0, 3.0))
    assert line_fit([1, 2, 3], [5.0, math.nan, 9.0]) == pytest.approx((2.0, 3.0))
    assert line_fit([4], [1.0]) is None
    assert line_fit([], []) is None


def test_rolling_mean_and_ratio():
    assert rolling_mean([1.0, 2.0, 3.0, 4.0], 2) == [1.5, 2.5, 3.5]
    assert rolling_mean([1.0], 2) == []
    assert ratio(1, 4) == 0.25
    assert ratio(1, 0) is None


@given(st.integers(0, 300), st.integers(1, 300))
def test_wilson_contains_the_share(correct, total):
    correct = min(correct, total)
    low, high = wilson(correct, total)
    assert 0.0 <= low <= correct / total <= high + 1e-12 <= 1.0 + 1e-12


@given(st.lists(st.floats(-0.5, 1.5), min_size=1, max_size=8))
def test_spread_labels_do_not_overlap_and_keep_their_order(heights):
    placed = spread(sorted(heights), [0.07] * len(heights))
    assert all(b - a >= 0.07 - 1e-9 for a, b in itertools.pairwise(placed))
    assert min(placed) >= -1e-9
    assert max(placed) <= 1.0 + 1e-9


def test_spread_gives_tall_labels_more_room_and_leaves_distant_ones_alone():
    assert spread([0.5, 0.52], [0.07, 0.14]) == pytest.approx([0.5, 0.605])
    assert spread([0.1, 0.9], [0.07, 0.14]) == [0.1, 0.9]
    assert spread([], []) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(None), "–"),
        (number(0.0), "0"),
        (number(0.6123), "0.612"),
        (number(38.21), "38.2"),
        (number(1240.4), "1240"),
        (number(0.00031), "0.00031"),
        (percent(0.0482), "4.82\u00a0%"),
        (percent(None), "–"),
        (megabytes(472_000), "472\u00a0kB"),
        (megabytes(12), "12\u00a0B"),
        (duration(1.72), "1.72 s"),
        (duration(425), "7 min 05 s"),
        (signed(-0.00027), "\u22120.00027"),
    ],
)
def test_numbers_for_people(text, expected):
    assert text == expected
