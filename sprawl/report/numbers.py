"""Small statistics over ledger columns. None and non-finite values (refused steps) are left out everywhere."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

FIRST, LAST = 10, 20  # steps in the "first" and "last" windows of every before/after number


def finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(values: Iterable[float | None]) -> float | None:
    kept = finite(values)
    return statistics.fmean(kept) if kept else None


def median(values: Iterable[float | None]) -> float | None:
    kept = finite(values)
    return statistics.median(kept) if kept else None


def first_mean(values: Sequence[float | None]) -> float | None:
    """Mean of the first 10 steps; where none of them has a value (sparse probes), the first value there is."""
    kept = finite(values)
    return mean(values[:FIRST]) if finite(values[:FIRST]) else (kept[0] if kept else None)


def last_mean(values: Sequence[float | None]) -> float | None:
    """Mean of the last 20 steps; where none of them has a value (sparse probes), the newest value there is."""
    kept = finite(values)
    return mean(values[-LAST:]) if finite(values[-LAST:]) else (kept[-1] if kept else None)


def ratio(numerator: float, denominator: float) -> float | None:
    """None where there is nothing to compare with (a wire that does not exist)."""
    return numerator / denominator if denominator else None


def line_fit(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float] | None:
    """Least-squares (slope, intercept) of ys over xs; None for fewer than two distinct xs."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
    if len({x for x, _ in points}) < 2:
        return None
    fit = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return fit.slope, fit.intercept


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Trailing means of full windows: element i is the mean of values[i : i + window]."""
    if window < 1 or window > len(values):
        return []
    return [statistics.fmean(values[i : i + window]) for i in range(len(values) - window + 1)]


def wilson(correct: int, total: int) -> tuple[float, float]:
    """95 % Wilson interval of a share; (0, 1) without observations."""
    if total == 0:
        return 0.0, 1.0
    z, share = 1.96, correct / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    # Rounding must not leave the share itself outside.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))
