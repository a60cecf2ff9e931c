"""Signs of drift in the steps so far. Pure; each says how severe it is against its limit, and when it was seen.

A symptom of severity 1 is at its limit. What a level of the controller has changed can only be judged by what was
measured under it, so trends and means start with the level that is in force (`since`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sprawl.config_control import ControlConfig
from sprawl.control.observation import Observation
from sprawl.control.trend import mann_kendall, relative_rise, theil_sen

Kind = Literal["mismatch", "speed", "kl", "entropy", "reward", "sign", "stale"]

MEAN = 10  # steps in the means of the reward
TREND_POINTS = 8  # fewer say nothing about a trend
PROBES = 5  # probes of the dense view that are read together
SURE = 3.0  # standard scores: what a trend or a loss has to exceed to be more than noise


@dataclass(frozen=True)
class Symptom:
    """at: the step of the newest measurement behind it. lasting: severity without what a single measurement can do,
    by which calm is judged; None: the same."""

    kind: Kind
    severity: float
    at: int
    text: str
    lasting: float | None = None

    @property
    def unrest(self) -> float:
        return self.severity if self.lasting is None else self.lasting


@dataclass(frozen=True)
class Marks:
    """What the controller remembers of steps that have left its window.

    best_reward: highest 10-step mean so far, best_step: its last step; entropy: median of the first ten steps.
    """

    best_reward: float | None = None
    best_step: int | None = None
    entropy: float | None = None


def update_marks(marks: Marks, history: Sequence[Observation]) -> Marks:
    """The marks after the newest step of `history`."""
    best, best_step, entropy = marks.best_reward, marks.best_step, marks.entropy
    recent = history[-MEAN:]
    if len(recent) == MEAN:
        mean = statistics.fmean(seen.reward for seen in recent)
        if best is None or mean > best:
            best, best_step = mean, recent[-1].step
        if entropy is None:
            known = [seen.entropy for seen in recent if seen.entropy is not None]
            entropy = statistics.median(known) if known else None
    return Marks(best, best_step, entropy)


def find_symptoms(
    history: Sequence[Observation],
    marks: Marks,
    config: ControlConfig,
    *,
    since: int,
    fire_every: int | None,
    compressed: bool,
) -> list[Symptom]:
    """What can be read from the steps so far, the worst first; a severity may be below 0.

    history: ascending, at least the newest `window` steps. since: first step of the level in force, 0 before any.
    fire_every: c, None without an anchor. compressed: whether a codec stands between sampler and trainer.
    """
    if not history:
        return []
    own = [seen for seen in history[-config.window :] if seen.step >= since]
    found = [
        _mismatch(own, config),
        _speed(history, config),
        _kl([seen for seen in history if seen.step >= since], config),
        _reward(own, marks, config),
        _sign(history),
    ]
    if compressed:
        found.append(_entropy(own, marks, config))
    if fire_every is not None:
        found.append(_stale(history[-1], fire_every, config))
    return sorted((one for one in found if one is not None), key=lambda one: -one.severity)


def _mismatch(own: Sequence[Observation], config: ControlConfig) -> Symptom | None:
    points = [(seen.step, seen.mismatch) for seen in own if seen.mismatch is not None]
    if len(points) < TREND_POINTS:
        return None
    steps, values = [step for step, _ in points], [value for _, value in points]
    rise = relative_rise(steps, values, config.window)
    if mann_kendall(values) <= SURE:
        return None
    text = f"the mismatch rises by {rise:.0%} of its level in {config.window} steps, now {values[-1]:.3g} nats/token"
    return Symptom("mismatch", rise / config.rise, steps[-1], text)


def _speed(history: Sequence[Observation], config: ControlConfig) -> Symptom | None:
    """The newest probe raises the alarm; calm is the median of the last ones, which read few rows."""
    probes = [
        (seen.step, seen.mismatch_dense / max(1.0, seen.staleness))
        for seen in history
        if seen.mismatch_dense is not None
    ][-PROBES:]
    if not probes:
        return None
    at, speed = probes[-1]
    lasting = statistics.median(value for _, value in probes) / config.speed
    text = f"the dense view moves {speed:.3g} nats/token a version (step {at})"
    return Symptom("speed", speed / config.speed, at, text, lasting)


def _kl(own: Sequence[Observation], config: ControlConfig) -> Symptom | None:
    """Growth over the last probes, robust: a probe reads few rows, and its KL depends on which."""
    probes = [(seen.step, seen.kl_dense) for seen in own if seen.kl_dense is not None][-PROBES:]
    steps, values = [step for step, _ in probes], [value for _, value in probes]
    if len(probes) < 3 or mann_kendall(values) <= 1:
        return None
    rate = theil_sen(steps, values)
    text = f"the dense KL to the base grows by {rate:.3g} nats/token a step, to {values[-1]:.3g} at step {steps[-1]}"
    return Symptom("kl", rate / config.kl_speed, steps[-1], text)


def _entropy(own: Sequence[Observation], marks: Marks, config: ControlConfig) -> Symptom | None:
    known = [(seen.step, seen.entropy) for seen in own if seen.entropy is not None][-5:]
    if len(known) < 3 or not marks.entropy:
        return None
    now = statistics.median(value for _, value in known)
    loss = 1 - now / marks.entropy
    text = f"the entropy through the codec lost {loss:.0%} of its first level, now {now:.3g} nats/token"
    return Symptom("entropy", loss / config.entropy_loss, known[-1][0], text)


def _reward(own: Sequence[Observation], marks: Marks, config: ControlConfig) -> Symptom | None:
    """A loss counts as far as it is more than the noise of the steps it is read from."""
    recent = [seen.reward for seen in own[-MEAN:]]
    if len(recent) < TREND_POINTS or not marks.best_reward:
        return None
    mean = statistics.fmean(recent)
    loss, error = marks.best_reward - mean, statistics.stdev(recent) * math.sqrt(2 / len(recent))
    score = loss / error if error else math.inf
    severity = min(loss / marks.best_reward / config.fall, score / SURE)
    text = f"the reward fell from {marks.best_reward:.3g} (best mean, up to step {marks.best_step}) to {mean:.3g}"
    return Symptom("reward", severity, own[-1].step, text)


def _sign(history: Sequence[Observation]) -> Symptom | None:
    """M may agree with few elements of the gradient; it must not agree with fewer than chance."""
    probe = next((seen for seen in reversed(history) if seen.dense_sign_agreement is not None), None)
    if probe is None or probe.dense_sign_agreement is None or probe.sign_fire != history[-1].sign_fire:
        return None
    share = probe.dense_sign_agreement
    text = f"{share:.0%} of the dense gradient agrees with M (step {probe.step}, age {probe.sign_age}), chance is 50%"
    return Symptom("sign", (0.5 - share) / 0.05, probe.step, text)


def _stale(newest: Observation, every: int, config: ControlConfig) -> Symptom | None:
    """Up to c every sign map gets."""
    if newest.sign_age is None:
        return None
    text = f"the sign map in use is {newest.sign_age} steps old"
    return Symptom("stale", (newest.sign_age / every - 1) / (config.stale_after - 1), newest.step, text)


def improving(history: Sequence[Observation], since: int) -> bool:
    """Whether the reward has a rising trend under the level in force."""
    own = [seen for seen in history if seen.step >= since]
    rewards = [seen.reward for seen in own]
    return theil_sen([seen.step for seen in own], rewards) > 0 and mann_kendall(rewards) > SURE / 2
