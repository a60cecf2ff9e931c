"""What is wrong with a run that trains: findings that a person should look at, from its ledger. Pure.

The level of the mismatch between sampler and trainer is the price of the boundary codec and says nothing; a mismatch
that grows says that the two drift apart, and precedes the collapse of reward and entropy. So the trend is watched.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sprawl.board.ledger import is_live
from sprawl.report.data import RunData
from sprawl.report.numbers import line_fit, rolling_mean
from sprawl.report.text import number, percent
from sprawl.report.violations import find_violations

TREND_STEPS = 60
"""Steps a trend is read from: the newest ones."""
TREND_MIN_STEPS = 30
TREND_GROWTH = 0.25
"""Growth over the window, as a share of its level, that counts as drift."""
TREND_ERRORS = 4.0
"""Standard errors the slope has to be away from 0: noise about a level does not get there."""
TREND_FLOOR = 0.01
"""nats/token below which a mismatch is rounding, whatever its trend."""

COLLAPSE_STEPS = 20
"""Steps in the means that a collapse of the reward is read from."""
COLLAPSE_SHARE = 0.5
"""A reward below this share of its best is a collapse..."""
COLLAPSE_BEST = 0.05
"""...where there was one worth the name."""

Reason = Literal["mismatch_trend", "reward_collapse", "violation", "no_island"]


@dataclass(frozen=True)
class Finding:
    """`step`: the newest step when it was found; of a violation 0, so that it is the same finding ever after."""

    reason: Reason
    step: int
    message: str


@dataclass(frozen=True)
class Trend:
    """A straight line through the newest values: `growth` over the window as a share of its level, and the slope's
    distance from 0 in standard errors."""

    slope: float
    growth: float
    errors: float


def trend(steps: Sequence[int], values: Sequence[float]) -> Trend | None:
    """Of the last `TREND_STEPS` finite values; None for fewer than `TREND_MIN_STEPS`, or a level that is not positive.

    The level is the fitted line's value at the window's beginning, at least a tenth of the mean.
    """
    points = [(x, y) for x, y in zip(steps, values, strict=True) if math.isfinite(y)][-TREND_STEPS:]
    if len(points) < TREND_MIN_STEPS:
        return None
    xs, ys = [x for x, _ in points], [y for _, y in points]
    fit = line_fit(xs, ys)
    mean = statistics.fmean(ys)
    if fit is None or mean <= 0:
        return None
    slope, intercept = fit
    rest = sum((y - intercept - slope * x) ** 2 for x, y in points) / (len(points) - 2)
    centre = statistics.fmean(xs)
    error = math.sqrt(rest / sum((x - centre) ** 2 for x in xs))
    level = max(intercept + slope * xs[0], mean / 10)
    errors = abs(slope) / error if error > 0 else math.inf
    return Trend(slope, slope * (xs[-1] - xs[0]) / level, errors)


def findings(data: RunData, now: float) -> list[Finding]:
    """Everything that needs a person, the worst first. `now` in Unix seconds."""
    found = [Finding("violation", 0, violation) for violation in find_violations(data)]
    found += _reward_collapsed(data)
    found += _mismatch_drifts(data)
    if not data.finished and data.islands and not any(is_live(record, now) for record in data.islands):
        names = ", ".join(record.island_id for record in data.islands[:5])
        found.append(Finding("no_island", data.last_step, f"no island is alive (of {len(data.islands)}: {names})"))
    return found


def _reward_collapsed(data: RunData) -> list[Finding]:
    means = rolling_mean([record.reward for record in data.steps], COLLAPSE_STEPS)
    if not means:
        return []
    best, now = max(means), means[-1]
    if best < COLLAPSE_BEST or now >= COLLAPSE_SHARE * best:
        return []
    at = data.steps[means.index(best) + COLLAPSE_STEPS - 1].step
    levels = f"{number(now)} over the last {COLLAPSE_STEPS} steps, {number(best)} at its best (step {at})"
    return [Finding("reward_collapse", data.last_step, f"the reward collapsed: {levels}")]


def _mismatch_drifts(data: RunData) -> list[Finding]:
    # Steps through dense boundaries (boundary.dense_every) have another level: they would look like a slope.
    records = [record for record in data.steps if not record.dense_step]
    seen = trend([record.step for record in records], [record.mismatch for record in records])
    if seen is None or seen.growth < TREND_GROWTH or seen.errors < TREND_ERRORS:
        return []
    newest = statistics.fmean([r.mismatch for r in records if math.isfinite(r.mismatch)][-10:])
    if newest < TREND_FLOOR:
        return []
    message = (
        f"the mismatch of sampler and trainer drifts: it grew by {percent(seen.growth)} in the last "
        f"{min(TREND_STEPS, len(records))} steps, to {number(newest)} nats/token"
    )
    return [Finding("mismatch_trend", data.last_step, message)]
