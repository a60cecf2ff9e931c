"""The numbers of a study: runs cut to the same number of steps, every number with its spread over the seeds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from sprawl.board.records import EvaluationRecord
from sprawl.report.data import RunData
from sprawl.report.numbers import finite, mean, rolling_mean, wilson
from sprawl.report.summary import summarise_data
from sprawl.study.config import ArmConfig, StudyConfig
from sprawl.study.plan import Cell

COLLAPSE_WINDOW = 20
COLLAPSE_SHARE = 0.5
COLLAPSE_RULE = (
    f"collapsed: the mean reward of {COLLAPSE_WINDOW} steps fell below half of the best such mean before it, or the "
    "last greedy accuracy is below the base model's (its 95 % interval ends below), or the run stopped by itself"
)


@dataclass(frozen=True)
class Spread:
    """One number of an arm over its seeds. `values` are in the order of the seeds, None where a run has none."""

    values: tuple[float | None, ...]

    @property
    def known(self) -> list[float]:
        return finite(self.values)

    @property
    def mean(self) -> float | None:
        return mean(self.values)

    def as_dict(self) -> dict[str, Any]:
        known = self.known
        return {
            "mean": self.mean,
            "min": min(known, default=None),
            "max": max(known, default=None),
            "values": [value if value in known else None for value in self.values],
        }


@dataclass(frozen=True)
class Verdict:
    """How a run went: `step` is where it collapsed or ended, None for one that did neither."""

    kind: Literal["healthy", "collapsed", "stopped", "unfinished"]
    step: int | None = None


@dataclass(frozen=True)
class ArmRuns:
    """The runs of one arm that have a step, whole, and how many steps of them are looked at."""

    arm: ArmConfig
    label: str
    steps: int
    seeds: tuple[int, ...]
    runs: tuple[RunData, ...]

    @property
    def cut(self) -> list[RunData]:
        return [first_steps(data, self.steps) for data in self.runs]

    @property
    def complete(self) -> list[RunData]:
        """Cut runs that got as far as this: only they are averaged."""
        return [data for data in self.cut if data.last_step >= self.steps]

    def spread(self, of: Callable[[RunData], float | None]) -> Spread:
        return Spread(tuple(of(data) for data in self.complete))

    def verdicts(self) -> dict[int, Verdict]:
        """By seed."""
        return {seed: verdict(data, self.steps) for seed, data in zip(self.seeds, self.runs, strict=True)}


def first_steps(data: RunData, steps: int) -> RunData:
    """The run as it was after `steps` optimizer steps. What was written at its end goes with it, if it went further."""
    if data.last_step <= steps:
        return data
    return replace(
        data,
        steps=tuple(record for record in data.steps if record.step <= steps),
        evaluations=tuple(record for record in data.evaluations if record.step <= steps),
        fires=tuple(record for record in data.fires if record.step <= steps),
        events=tuple(event for event in data.events if event.step <= steps),
    )


def arm_runs(
    study: StudyConfig, arm: ArmConfig, cells: Sequence[Cell], known: Mapping[str, RunData], steps: int
) -> ArmRuns:
    """The runs of `arm` among `known`, to be looked at over `steps` steps (fewer when the arm has fewer)."""
    found = [(cell, known[cell.run_id]) for cell in cells if cell.arm.name == arm.name and cell.run_id in known]
    found = [(cell, data) for cell, data in found if data.steps]
    planned = max((cell.config.steps for cell, _ in found), default=steps)
    return ArmRuns(
        arm=arm,
        label=arm.title,
        steps=min(steps, planned),
        seeds=tuple(cell.seed for cell, _ in found),
        runs=tuple(data for _, data in found),
    )


def verdict(data: RunData, steps: int) -> Verdict:
    """By COLLAPSE_RULE, over the first `steps` steps. `data` is the whole run."""
    cut = first_steps(data, steps)
    at = collapsed_at([record.reward for record in cut.steps])
    if at is not None:
        return Verdict("collapsed", cut.steps[at].step)
    if cut.last_step < steps:
        return Verdict("stopped" if gave_up(data) or diverged(data) else "unfinished", cut.last_step)
    if below_base(cut.evaluations):
        return Verdict("collapsed", cut.last_step)
    return Verdict("healthy")


def gave_up(data: RunData) -> bool:
    """Whether the last thing the run wrote is the verdict with which it stopped by itself."""
    return bool(data.events) and data.events[-1].kind == "verdict"


def diverged(data: RunData) -> bool:
    """Whether the last thing the run wrote is that a step was refused once too often: one it never published."""
    return bool(data.events) and data.events[-1].kind == "violation" and data.events[-1].step > data.last_step


def collapsed_at(rewards: Sequence[float]) -> int | None:
    """Index of the first reward whose trailing mean is below half of the best one before it."""
    means = rolling_mean(rewards, COLLAPSE_WINDOW)
    best = 0.0
    for place, value in enumerate(means):
        if value < COLLAPSE_SHARE * best:
            return place + COLLAPSE_WINDOW - 1
        best = max(best, value)
    return None


def below_base(evaluations: Sequence[EvaluationRecord]) -> bool:
    """Whether the newest accuracy's 95 % interval ends below what the base model (version 0) scored."""
    if len(evaluations) < 2 or evaluations[0].version != 0:
        return False
    newest = evaluations[-1]
    return wilson(newest.correct, newest.problems)[1] < evaluations[0].accuracy


def arm_measures(runs: ArmRuns) -> dict[str, Spread]:
    """Everything the table of arms shows. Means are over the first 10 and the last 20 steps looked at."""
    summaries = [summarise_data(data) for data in runs.complete]

    def of(*path: str) -> Spread:
        return Spread(tuple(_at(summary, path) for summary in summaries))

    return {
        "reward_first10": of("reward_first10"),
        "reward_last20": of("reward_last20"),
        "greedy_accuracy": of("greedy_accuracy"),
        "mismatch": of("mismatch_last"),
        "mismatch_slope": of("mismatch_slope"),
        "mismatch_dense": of("mismatch_dense"),
        "entropy_compression": of("entropy", "compression", "last"),
        "entropy_dense": of("entropy", "dense", "last"),
        "kl_compression": of("kl", "compression", "last"),
        "kl_dense": of("kl", "dense", "last"),
        "grad_norm": of("grad_norm_median"),
        "boundary_bytes_ratio": of("boundary_bytes_ratio"),
        "sign_agreement": of("sign_agreement_mean"),
        "gradient_cosine": of("gradient_probe", "cosine", "last"),
        "corrected_cosine": of("gradient_probe", "corrected_cosine", "last"),
        "seconds_per_step": of("seconds_per_step"),
    }


def seconds_at(data: RunData) -> list[float]:
    """Training seconds spent when each step was committed: the steps' own, without evaluations and restarts."""
    return list(accumulate(record.seconds.get("total", 0.0) for record in data.steps))


def _at(summary: Mapping[str, Any], path: Iterable[str]) -> float | None:
    value: Any = summary
    for part in path:
        value = value[part]
    return value
