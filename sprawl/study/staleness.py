"""What staleness costs: reward at a step, after so many seconds, and how long a reward takes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sprawl.report.data import RunData
from sprawl.report.numbers import finite, mean, rolling_mean
from sprawl.study.config import MilestonesConfig
from sprawl.study.measures import ArmRuns, Spread, seconds_at

WINDOW = 10
"""Steps in the mean that stands for the reward at a step or at a moment."""


@dataclass(frozen=True)
class Milestones:
    """Where arms are compared: after so many steps, after so many training seconds, at these rewards."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    rewards: tuple[float, ...]


def milestones(wanted: MilestonesConfig, arms: Sequence[ArmRuns]) -> Milestones:
    """The study's; without seconds, half and all of what the quickest of all complete runs took, if any of them has
    seconds."""
    quickest = min(finite(seconds_at(data)[-1] for runs in arms for data in runs.complete), default=0.0)
    longest = max((runs.steps for runs in arms), default=0)
    return Milestones(
        steps=tuple(step for step in wanted.steps if step <= longest),
        seconds=tuple(wanted.seconds) or ((quickest / 2, quickest) if quickest else ()),
        rewards=tuple(wanted.rewards),
    )


def reward_at_step(data: RunData, step: float) -> float | None:
    """Mean of the 10 steps up to and with `step`; None when the run is shorter."""
    if data.last_step < step:
        return None
    return mean(record.reward for record in data.steps if step - WINDOW < record.step <= step)


def reward_after(data: RunData, seconds: float) -> float | None:
    """Mean of the last 10 steps committed within so many training seconds; None before the first one."""
    done = [record.reward for record, at in zip(data.steps, seconds_at(data), strict=True) if at <= seconds]
    return mean(done[-WINDOW:])


def seconds_to(data: RunData, reward: float) -> float | None:
    """Training seconds until the mean of 10 steps first was `reward` or more; None when it never was."""
    place = _reached(data, reward)
    return None if place is None else seconds_at(data)[place]


def steps_to(data: RunData, reward: float) -> float | None:
    """The step at which the mean of 10 steps first was `reward` or more; None when it never was."""
    place = _reached(data, reward)
    return None if place is None else float(data.steps[place].step)


def staleness_measures(runs: ArmRuns, at: Milestones) -> dict[str, Spread]:
    """Everything the table of staleness shows of one arm."""

    def of(measure: Callable[[RunData, float], float | None], where: float) -> Spread:
        return runs.spread(lambda data: measure(data, where))

    result = {
        "staleness": runs.spread(lambda data: mean(record.staleness for record in data.steps)),
        "off_policy_cut": runs.spread(lambda data: mean(record.off_policy_cut for record in data.steps)),
    }
    result |= {f"reward_at_{step}": of(reward_at_step, step) for step in at.steps}
    result |= {f"reward_after_{seconds:.0f}s": of(reward_after, seconds) for seconds in at.seconds}
    for reward in at.rewards:
        result |= {f"seconds_to_{reward:g}": of(seconds_to, reward), f"steps_to_{reward:g}": of(steps_to, reward)}
    return result


def _reached(data: RunData, reward: float) -> int | None:
    means = rolling_mean([record.reward for record in data.steps], WINDOW)
    return next((place + WINDOW - 1 for place, value in enumerate(means) if value >= reward), None)
