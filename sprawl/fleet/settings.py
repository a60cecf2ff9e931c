"""What a fleet may do: bounds, costs, patience. Not part of a run's config: it changes while a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from sprawl.config_files import apply_overrides, read_yaml, validated
from sprawl.config_training import Section

Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


class FleetSettings(Section):
    """Bounds of a fleet, and how patient it is."""

    min_islands: Count = Field(1, description="While the run goes on; at its end there are none.")
    max_islands: Count = Field(8, description="Never more than these.")
    start_islands: Count = Field(2, description="Until steps have been measured.")
    island_hourly_cost: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Dollars an hour one island may cost at most: machines that are dearer are not taken."
    )
    max_hourly_cost: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Dollars an hour for all islands together; needs island_hourly_cost."
    )

    window: Annotated[int, Field(ge=1, le=100)] = Field(16, description="Steps the balance is measured over.")
    evidence: Annotated[int, Field(ge=1)] = Field(
        3, description="Steps since the last change before the next one; must fit the window."
    )
    idle_high: Share = Field(0.10, description="Share of a step the trainer waits for rollouts, above which it grows.")
    load_high: Annotated[float, Field(gt=0)] = Field(
        0.95, description="Share of a step that islands are busy, above which it grows."
    )
    load_low: Share = Field(0.60, description="Share of a step that islands are busy, below which it shrinks.")
    load_aim: Annotated[float, Field(gt=0, le=1)] = Field(0.85, description="Share of a step islands should be busy.")
    grow_cooldown_s: Seconds = Field(120.0, description="Between two additions.")
    shrink_cooldown_s: Seconds = Field(600.0, description="Between any change and the next reduction.")

    start_limit_s: Seconds = Field(
        1200.0, description="From a machine's start to the island's first heartbeat: installing, the first keyframe."
    )
    appear_limit_s: Seconds = Field(600.0, description="From the decision until the machine's request is known.")
    lost_after_s: Seconds = Field(180.0, description="Silence of an island whose machine is said to run: replaced.")
    drain_limit_s: Seconds = Field(120.0, description="From the decision until a draining island is cancelled.")
    stall_s: Seconds = Field(3600.0, description="Islands are ready and no step has come for so long: none is kept.")
    backoff_limit_s: Seconds = Field(1800.0, description="The longest pause after islands that never came up.")

    @model_validator(mode="after")
    def _check(self) -> FleetSettings:
        if not self.min_islands <= self.start_islands <= self.max_islands:
            raise ValueError(
                f"min_islands={self.min_islands}, start_islands={self.start_islands} and "
                f"max_islands={self.max_islands} have to ascend"
            )
        if self.max_hourly_cost is not None and self.island_hourly_cost is None:
            raise ValueError("max_hourly_cost needs island_hourly_cost: it decides how many there can be")
        if self.evidence > self.window:
            raise ValueError(f"evidence={self.evidence} is above window={self.window}")
        if not self.load_low < self.load_aim <= self.load_high:
            raise ValueError(
                f"load_low={self.load_low}, load_aim={self.load_aim} and load_high={self.load_high} have to ascend"
            )
        return self

    @property
    def affordable(self) -> int:
        """Islands that the cap on cost allows."""
        if self.max_hourly_cost is None or self.island_hourly_cost is None:
            return self.max_islands
        return min(self.max_islands, int(self.max_hourly_cost / self.island_hourly_cost + 1e-9))


def load_settings(path: Path | None = None, overrides: tuple[str, ...] | list[str] = ()) -> FleetSettings:
    """Settings from a YAML file and `name=value` overrides. Raises ConfigError with one line that names the field."""
    source = str(path) if path else "fleet settings"
    data = read_yaml(path, "fleet settings", "or give them one by one with --set NAME=VALUE") if path else {}
    if isinstance(data, dict):
        data = apply_overrides(data, list(overrides))
    return validated(FleetSettings, data, source, "fleet settings")
