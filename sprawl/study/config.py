"""A study file: one YAML = one comparison. Pydantic models of it; unknown keys are refused with the field named."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from sprawl.config import Positive, Section
from sprawl.config_files import read_yaml, validated

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,30}$")]
Overrides = dict[str, Any]
"""Dotted fields of a run's config and their values, as in `--set section.field=value`."""
Panel = Literal["reward", "reward_wall", "entropy", "kl", "mismatch", "grad_norm", "accuracy"]
Colour = Literal["blue", "vermillion", "green", "purple", "orange", "sky"]
TableKind = Literal["arms", "staleness"]
Seed = Annotated[int, Field(ge=0, lt=2**31)]

_FIELDS_OF_THE_STUDY = {"seed": "seeds", "steps": "steps", "board": "--board"}
# Small, but with three fires, two keyframes, four probes and an evaluation in 12 steps.
_QUICK: Overrides = {
    "rollout.prompts": 4,
    "rollout.samples": 8,
    "checkpoint.every": 2,
    "anchor.every": 4,
    "anchor.lag": 4,
    "publish.keyframe_every": 6,
    "probe.every": 3,
    "evaluate.every": 12,
    "evaluate.problems": 40,
}


def _check_overrides(overrides: Overrides) -> Overrides:
    for field, instead in _FIELDS_OF_THE_STUDY.items():
        if field in overrides:
            raise ValueError(f"{field!r} is no override of an arm: the study's {instead} says it")
    return overrides


class ArmConfig(Section):
    """One arm, or one value of an axis: what it changes of the base config."""

    name: Name
    label: str | None = Field(None, description="How tables and figures call it; default: the name.")
    steps: Positive | None = Field(None, description="Steps of this arm where they differ from the study's.")
    colour: Colour | None = Field(None, description="Its colour in figures; default: the next free one.")
    overrides: Overrides = Field(default_factory=dict)

    _overrides = field_validator("overrides")(_check_overrides)

    @property
    def title(self) -> str:
        return self.label or self.name


class GroupConfig(Section):
    """Arms drawn into one figure."""

    name: Name
    title: str
    arms: list[str] = Field(min_length=1, description="Names of arms, or patterns such as dense-*.")
    panels: list[Panel] = Field(default=["reward", "entropy", "kl", "mismatch"], min_length=1)
    ordered: bool = Field(False, description="The arms are steps of one quantity: shades of one colour instead of six.")
    steps: Positive | None = Field(None, description="How many steps the figure shows; default: the study's.")


class MilestonesConfig(Section):
    """Where the table of staleness compares arms."""

    steps: list[Positive] = Field(default=[25, 50, 100])
    seconds: list[Annotated[float, Field(gt=0)]] = Field(
        default=[], description="Training seconds; default: half and all of what the quickest run took."
    )
    rewards: list[Annotated[float, Field(gt=0, le=1)]] = Field(default=[0.5, 0.6, 0.7])


class TimingConfig(Section):
    """Seconds a step from a short run of every arm, one at a time after all others: rewards may then come from runs
    that were trained side by side."""

    steps: Annotated[int, Field(ge=4)] = Field(
        12, description="Steps of the short run; the median of its second half counts, so that queues have filled."
    )
    free: list[str] = Field(
        default=[],
        description="Fields that cost a step nothing: arms that differ in no other share the first one's short run.",
    )


class QuickConfig(Section):
    """The same arms, so small that the whole study is a check and no measurement."""

    steps: Positive = 12
    overrides: Overrides = Field(default_factory=lambda: dict(_QUICK))

    _overrides = field_validator("overrides")(_check_overrides)


class StudyConfig(Section):
    """A whole study. `arms` are listed; `axes` add every combination of one value an axis."""

    name: Name
    title: str
    base: str = Field(description="Run YAML that every arm starts from.")
    steps: Positive = Field(description="Steps of an arm that has no number of its own; also where arms are compared.")
    seeds: list[Seed] = Field(min_length=1)
    parallel: Positive = Field(1, description="Runs at a time.")
    keep: Literal["all", "ledger"] = Field(
        "all", description="ledger: a finished run's versions, rollouts and checkpoints are deleted from the board."
    )
    overrides: Overrides = Field(default_factory=dict, description="What all arms change of the base config.")
    arms: list[ArmConfig] = Field(default_factory=list)
    axes: list[Annotated[list[ArmConfig], Field(min_length=1)]] = Field(default_factory=list)
    groups: list[GroupConfig] = Field(default_factory=list)
    tables: list[TableKind] = Field(default=["arms"], min_length=1)
    milestones: MilestonesConfig = MilestonesConfig()
    timing: TimingConfig | None = Field(
        None, description="Take seconds from short runs of their own; default: from the runs themselves."
    )
    quick: QuickConfig = QuickConfig()

    _overrides = field_validator("overrides")(_check_overrides)

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("a seed is listed twice")
        return seeds

    @model_validator(mode="after")
    def _check(self) -> StudyConfig:
        names = [arm.name for arm in self.all_arms()]
        if not names:
            raise ValueError("a study needs arms, or axes")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two arms are called {twice[0]!r}")
        changed = {field for arm in self.all_arms() for field in arm.overrides}
        if self.timing and (idle := sorted(set(self.timing.free) - changed)):
            raise ValueError(f"timing.free names {idle[0]!r}, which no arm changes")
        groups = [group.name for group in self.groups]
        if twice := sorted({name for name in groups if groups.count(name) > 1}):
            raise ValueError(f"two groups are called {twice[0]!r}")
        for group in self.groups:
            for pattern in group.arms:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise ValueError(f"group {group.name!r} has no arm {pattern!r}; arms are {', '.join(names)}")
        return self

    def all_arms(self) -> list[ArmConfig]:
        """The listed arms, then the combinations of the axes in the order of a nested loop."""
        return [*self.arms, *(combined(values) for values in product(*self.axes) if values)]

    def arms_of(self, group: GroupConfig) -> list[ArmConfig]:
        """In the order in which the group names them, each once."""
        arms, found = self.all_arms(), []
        for pattern in group.arms:
            found += [arm for arm in arms if fnmatchcase(arm.name, pattern) and arm not in found]
        return found


def combined(values: tuple[ArmConfig, ...]) -> ArmConfig:
    """One value of every axis as one arm; where two axes change the same field the later one counts."""
    overrides: Overrides = {}
    for value in values:
        overrides |= value.overrides
    steps = [value.steps for value in values if value.steps is not None]
    return ArmConfig(
        name="-".join(value.name for value in values),
        label=", ".join(value.title for value in values),
        steps=steps[-1] if steps else None,
        overrides=overrides,
    )


def parse_study(data: Any, source: str = "study") -> StudyConfig:
    """Validate a mapping. Raises `ConfigError` with one line that names every wrong field."""
    return validated(StudyConfig, data, source, "study settings")


def load_study(path: str | Path) -> StudyConfig:
    """Read and validate a study YAML. Raises `ConfigError` (missing file, YAML syntax, wrong fields)."""
    return parse_study(read_yaml(path, "study", "see configs/compare/ for the ones that ship"), str(path))
