"""Robust trends of short series: the slope that outliers do not move, and whether there is one at all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def theil_sen(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Median of the slopes between all pairs of points (Theil 1950, Sen 1968); 0 without two distinct xs."""
    slopes = [
        (ys[j] - ys[i]) / (xs[j] - xs[i]) for i in range(len(xs)) for j in range(i + 1, len(xs)) if xs[j] != xs[i]
    ]
    return statistics.median(slopes) if slopes else 0.0


def mann_kendall(ys: Sequence[float]) -> float:
    """Standard score of the Mann-Kendall test: how far the number of rising pairs is from chance.

    Without a trend it is about standard normal from eight points on; ties are corrected for; 0 for fewer than three.
    """
    count = len(ys)
    if count < 3:
        return 0.0
    score = sum((ys[j] > ys[i]) - (ys[j] < ys[i]) for i in range(count) for j in range(i + 1, count))
    ties = [ys.count(value) for value in set(ys)]
    variance = (count * (count - 1) * (2 * count + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    if score == 0 or variance <= 0:
        return 0.0
    return (score - math.copysign(1, score)) / math.sqrt(variance)


def relative_rise(xs: Sequence[float], ys: Sequence[float], span: float) -> float:
    """What the robust slope adds over `span`, relative to the median of |ys|; 0 where that is 0."""
    level = statistics.median([abs(y) for y in ys]) if ys else 0.0
    return theil_sen(xs, ys) * span / level if level else 0.0
