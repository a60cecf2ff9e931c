"""Sections of a run's config that say what crosses a boundary and what the loss is (part of `sprawl.config`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class BoundaryConfig(Section):
    codec: Literal["dense", "prf", "subspace", "quantized-prf"] = Field(
        "prf", description="What a stage boundary sends; subspace needs the anchor, which fits its bases."
    )
    ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        0.05, description="Share of a token's bytes that crosses; k = round(ratio*H) numbers."
    )
    bits: Literal[3, 4, 8] = Field(3, description="Bits a channel of quantized-prf: fewer bits, more channels.")
    dense_every: Annotated[int, Field(ge=0)] = Field(
        0, description="Every n-th step runs through dense boundaries (all its passes); 0: none does."
    )


class OverlongConfig(Section):
    """What becomes of a response that used up `rollout.max_new_tokens`."""

    kind: Literal["keep", "filter", "penalty"] = Field(
        "keep", description="filter: truncated samples give no gradient; penalty: DAPO's soft one, off the reward."
    )
    buffer: Positive | None = Field(
        None, description="Tokens before the limit over which the penalty grows from 0 to 1; needed by penalty."
    )

    @model_validator(mode="after")
    def _check(self) -> OverlongConfig:
        if (self.kind == "penalty") != (self.buffer is not None):
            raise ValueError("buffer belongs to kind: penalty, which needs it")
        return self


class OffPolicyConfig(Section):
    """Correction by pi_trainer / pi_sampler, both before this step's update."""

    kind: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    tis_cap: Annotated[float, Field(gt=0)] = Field(2.0, description="tis: a token's weight is its ratio, at most this.")
    icepop_low: Annotated[float, Field(gt=0)] = Field(0.5, description="icepop: a ratio outside gives the token none.")
    icepop_high: Annotated[float, Field(gt=0)] = 5.0
    sequence_cap: Annotated[float, Field(gt=0)] = Field(
        3.0, description="sequence_mask: weight is the sequence's ratio; above this the sequence has none."
    )
    through_codec: bool = Field(
        False, description="Allow it with a codec, where the ratio measures the codec more than staleness."
    )

    @model_validator(mode="after")
    def _check(self) -> OffPolicyConfig:
        if self.icepop_low >= self.icepop_high:
            raise ValueError(f"icepop_low={self.icepop_low:g} must be below icepop_high={self.icepop_high:g}")
        return self


class GrpoConfig(Section):
    loss: Literal["ppo", "gspo", "cispo"] = Field("ppo", description="Clipped ratio a token, a sequence, or CISPO.")
    clip_low: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="Ratios below 1 - this are clipped.")
    clip_high: Annotated[float, Field(gt=0)] = Field(0.2, description="Ratios above 1 + this are (clip-higher: 0.28).")
    kl_coef: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight of the KL to the reference.")
    kl: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of that KL from the tokens taken.")
    aggregation: Literal["token_mean", "sequence_mean", "dr_grpo"] = Field(
        "token_mean", description="dr_grpo: sum over tokens / (samples * max_new_tokens)."
    )
    advantage: Literal["group_std", "group_mean"] = "group_std"
    zero_groups: Literal["keep", "drop"] = Field(
        "keep", description="drop: groups whose samples all scored the same do not count in the loss's denominator."
    )
    refill_rounds: Annotated[int, Field(ge=0, le=16)] = Field(
        0, description="Dynamic sampling: further rounds of prompts that may replace groups without an advantage."
    )
    overlong: OverlongConfig = OverlongConfig()
    off_policy: OffPolicyConfig = OffPolicyConfig()
    epochs: Positive = Field(1, description="Inner epochs over one batch.")
    minibatches: Positive = Field(1, description="Optimizer updates an inner epoch, each on its share of the rows.")
    microbatch_rows: Positive = Field(64, description="Sequences per forward/backward.")
    microbatch_tokens: Positive | None = Field(
        None, description="Tokens per forward/backward instead: sequences of like length together, at most this many."
    )
