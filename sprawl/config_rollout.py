"""The models of a run's rollouts. Pydantic models, no I/O; `sprawl.config` puts them together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sprawl.config_training import Positive, Section

Dtype = Literal["float32", "bfloat16"]


class RolloutConfig(Section):
    islands: Positive = Field(2, description="Rollout islands the local fleet starts.")
    prompts: Positive = Field(16, description="Prompts (groups) a step.")
    samples: Annotated[int, Field(ge=2)] = Field(16, description="Samples a prompt (group size).")
    max_new_tokens: Positive = 8
    temperature: Annotated[float, Field(gt=0)] = 1.0
    engine: Literal["torch", "vllm", "sglang"] = Field(
        "torch", description="What islands generate with, unless they say so."
    )
    compute_dtype: Dtype = Field("float32", description="Matmul dtype of the engine; weights are the served view.")
    max_staleness: Annotated[int, Field(ge=0)] = Field(
        1, description="Versions a rollout may lag behind the weights it trains; 1 overlaps sampling with training."
    )
    follow: Literal["demand", "eager"] = Field(
        "eager", description="demand: an island advances when a request needs it; eager: as soon as it can."
    )
    feed: Literal["steps", "stream"] = Field(
        "steps",
        description="steps: every step's prompts are asked for together and waited for; stream: prompts are asked for "
        "all the time, and a step trains on the groups that are finished first and not too old.",
    )
    in_flight: Positive | None = Field(
        None,
        description="Groups of a stream asked for and not yet trained or given up, at most; "
        "default: prompts * (1 + max_staleness).",
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(120.0, description="Deadline of one group, retries included.")
    episodes: Literal["tokens", "chat"] = Field(
        "tokens",
        description="How problem sets with tools are played: as tokens, or as messages by the model's chat template.",
    )
    continuation: bool = Field(
        False, description="Go on token by token on another island where a lost one stopped, instead of sampling again."
    )
    hedge: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        0.95, description="Percentile of recent durations after which a group is asked for twice; null: never."
    )

    @property
    def groups_in_flight(self) -> int:
        """The bound of a stream, in groups."""
        return self.in_flight or self.prompts * (1 + self.max_staleness)

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        if self.feed == "steps" and self.in_flight is not None:
            raise ValueError(f"in_flight={self.in_flight} needs feed: stream")
        if self.groups_in_flight < self.prompts:
            raise ValueError(f"in_flight={self.in_flight} is below prompts={self.prompts}: no batch would get full")
        if self.feed == "stream" and self.follow == "demand":
            raise ValueError(
                "feed=stream needs follow: eager (islands that wait to be asked always sample the stalest)"
            )
        return self
