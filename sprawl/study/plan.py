"""From a study to its cells: an arm with a seed is a cell, a cell is one run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sprawl.config import RunConfig, load_config
from sprawl.errors import ConfigError, SprawlError
from sprawl.study.config import ArmConfig, StudyConfig


@dataclass(frozen=True)
class Cell:
    """One run of a study. `overrides` are the `--set` values that make `config` of the base."""

    run_id: str
    arm: ArmConfig
    seed: int
    base: str
    overrides: tuple[str, ...]
    config: RunConfig

    @property
    def name(self) -> str:
        """`prf-anchor s7`: what progress lines start with."""
        return f"{self.arm.name} s{self.seed}"


def plan_cells(
    study: StudyConfig, *, quick: bool = False, only: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[Cell]:
    """Every run of the study, all arms of the first seed before the second seed's.

    `only`: names of arms, or patterns; `seeds`: some of the study's. `quick`: the small version, first seed only, under
    run ids of its own. Raises ConfigError with the errors of all arms at once, or for a name that no arm has.
    """
    arms = _chosen(study, only)
    unknown = [seed for seed in seeds if seed not in study.seeds]
    if unknown:
        raise ConfigError(f"study {study.name} has no seed {unknown[0]}", f"its seeds are {_numbers(study.seeds)}")
    wanted = [seed for seed in study.seeds if not seeds or seed in seeds]
    cells, errors = [], []
    for seed in wanted[:1] if quick else wanted:
        for arm in arms:
            try:
                cells.append(_cell(study, arm, seed, quick))
            except SprawlError as error:
                message = f"arm {arm.name}: {error}"
                if message not in errors:
                    errors.append(message)
    if errors:
        raise ConfigError("; ".join(errors))
    return cells


def plan_timing(study: StudyConfig, *, quick: bool = False, only: Sequence[str] = ()) -> list[Cell]:
    """The short runs that the seconds of the chosen arms are taken from, in the order of the arms; none for a study
    without `timing`, nor for its quick version. Raises ConfigError as `plan_cells`.
    """
    if study.timing is None or quick:
        return []
    steps, names = study.timing.steps, timing_names(study)
    chosen = {names[arm.name] for arm in _chosen(study, only)}
    return [
        _cell(study, _short(arm, steps), study.seeds[0], quick) for arm in study.all_arms() if _own_name(arm) in chosen
    ]


def timing_names(study: StudyConfig) -> dict[str, str]:
    """Which short run an arm's seconds come from: what that run is called in place of an arm, by the arm's name."""
    free = set(study.timing.free) if study.timing else set()
    first: dict[str, str] = {}
    names = {}
    for arm in study.all_arms():
        costs = json.dumps(
            {field: value for field, value in arm.overrides.items() if field not in free}, sort_keys=True
        )
        names[arm.name] = first.setdefault(costs, _own_name(arm))
    return names


def _own_name(arm: ArmConfig) -> str:
    return f"timing-{arm.name}"


def _short(arm: ArmConfig, steps: int) -> ArmConfig:
    overrides = arm.overrides | {"evaluate.every": steps}
    return arm.model_copy(update={"name": _own_name(arm), "steps": steps, "overrides": overrides})


def study_id(study: StudyConfig, quick: bool) -> str:
    """What run ids start with; quick runs never mix with real ones."""
    return f"{study.name}-quick" if quick else study.name


def steps_of(study: StudyConfig, arm: ArmConfig, quick: bool) -> int:
    return study.quick.steps if quick else (arm.steps or study.steps)


def _cell(study: StudyConfig, arm: ArmConfig, seed: int, quick: bool) -> Cell:
    from sprawl.problems import load_problem_set

    changes = study.overrides | (study.quick.overrides if quick else {}) | arm.overrides
    overrides = (
        f"steps={steps_of(study, arm, quick)}",
        f"seed={seed}",
        *(f"{field}={json.dumps(value)}" for field, value in changes.items()),
    )
    config = load_config(study.base, list(overrides))
    load_problem_set(config.problems.name, config.seed, config.problems.params)
    return Cell(f"{study_id(study, quick)}-{arm.name}-s{seed}", arm, seed, study.base, overrides, config)


def _chosen(study: StudyConfig, only: Sequence[str]) -> list[ArmConfig]:
    arms = study.all_arms()
    for pattern in only:
        if not any(fnmatchcase(arm.name, pattern) for arm in arms):
            names = ", ".join(arm.name for arm in arms)
            raise ConfigError(f"study {study.name} has no arm {pattern!r}", f"its arms are {names}")
    return [arm for arm in arms if not only or any(fnmatchcase(arm.name, pattern) for pattern in only)]


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)
