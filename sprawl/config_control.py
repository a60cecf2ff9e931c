"""The drift controller's section of a run's config (part of `sprawl.config`). What it does: `sprawl.control`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sprawl.config_training import Positive, Section

Share = Annotated[float, Field(gt=0, lt=1)]
Limit = Annotated[float, Field(gt=0)]


class ControlConfig(Section):
    """Limits are what a symptom is measured against: at its limit a symptom has severity 1."""

    enabled: bool = Field(False, description="Watch the run for drift and act on it; off: the plain system.")
    window: Annotated[int, Field(ge=8)] = Field(20, description="Steps that the trend of the mismatch is read from.")
    rise: Limit = Field(0.1, description="Rise of the mismatch over a window, relative to its level, that is drift.")
    speed: Limit = Field(
        0.02, description="Nats/token that the dense view may move away from the sampler per version between them."
    )
    kl_speed: Limit = Field(0.05, description="Nats/token a step that the dense KL to the base may grow by.")
    fall: Share = Field(0.25, description="Loss of the best 10-step mean reward, as a share of it, that is damage.")
    entropy_loss: Share = Field(
        0.5, description="Loss of the entropy seen through the codec, as a share of its first level, that is damage."
    )
    stale_after: Annotated[float, Field(gt=1)] = Field(
        2.0, description="Age of the sign map in multiples of anchor.every that is too old."
    )
    patience: Positive = Field(2, description="Steps a level has to show what it does before the next one is tried.")
    calm: Positive = Field(20, description="Quiet steps before a level is left again; doubled after every relapse.")
    fresh: Annotated[int, Field(ge=0)] = Field(
        5, description="While acting: a sign map has full strength up to this age, none from anchor.every on."
    )
    sign_floor: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="While acting: the strength of a sign map never falls below this share of the configured one."
    )
    bring_forward: bool = Field(True, description="While acting: ask the anchor for fires between the regular ones.")
    probe_every: Positive = Field(2, description="While acting: compression-off probe every n steps.")
    guard: Share = Field(0.5, description="Factor on the learning rate for each level from the second on.")
    dense_every: Annotated[int, Field(ge=0)] = Field(
        3, description="From the third level on: a dense step every n steps; 0: none."
    )
    stop_after: Annotated[int, Field(ge=0)] = Field(
        40, description="Steps at the last level without improvement before the run is stopped; 0: never."
    )
