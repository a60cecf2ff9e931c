"""One YAML = one run. Pydantic models of it; unknown keys are refused with the field named.

Nothing here does I/O except `load_config`. Every default is the report's run unless a comment says otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sprawl.config_control import ControlConfig
from sprawl.config_files import apply_overrides, describe_validation_error, read_yaml, validated
from sprawl.config_rollout import Dtype, RolloutConfig
from sprawl.config_training import BoundaryConfig, GrpoConfig, OffPolicyConfig, OverlongConfig, Positive, Section

__all__ = [
    "AnchorConfig",
    "BoundaryConfig",
    "CheckpointConfig",
    "ControlConfig",
    "Dtype",
    "EvaluateConfig",
    "GrpoConfig",
    "MuonConfig",
    "OffPolicyConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PolicyConfig",
    "Positive",
    "ProbeConfig",
    "ProblemsConfig",
    "PublishConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "ServedFormat",
    "ThreadsConfig",
    "apply_overrides",
    "describe_validation_error",
    "load_config",
    "parse_config",
]

ServedFormat = Literal[
    "bfloat16",
    "float16",
    "float8_e4m3",
    "float8_e4m3_channel",
    "float8_e4m3_block",
    "mxfp4",
    "nvfp4",
    "int4_g128",
    "int4_g32",
]
"""The formats of `sprawl.delta.views` that engines load."""


class PolicyConfig(Section):
    base: str = Field(description="Base model: a HF safetensors directory, or a recipe name such as smollm2-135m.")
    stages: Positive = Field(8, description="Pipeline stages; boundaries = stages - 1.")
    split: list[Positive] | None = Field(None, description="Layers per stage; default: as even as possible.")
    compute_dtype: Dtype = Field("float32", description="Matmul dtype of the trainer (masters are always fp32).")
    gradient_checkpointing: bool = Field(
        False, description="Keep a layer's input only and compute the rest again in the backward pass: memory for time."
    )
    runtime: Literal["single", "multi"] = Field(
        "single",
        description="multi: a process a stage, only boundary payloads cross between them; single: one process.",
    )
    replicas: Positive = Field(1, description="Copies of the pipeline that share a step's microbatches; needs multi.")
    liveness_s: Annotated[float, Field(gt=0)] = Field(
        120.0,
        description="Seconds without a sign of life after which a process of a multi-process trainer is lost and the "
        "run ends; how long a step takes does not matter.",
    )

    @property
    def processes(self) -> int:
        """Trainer processes."""
        return self.stages * self.replicas if self.runtime == "multi" else 1

    @model_validator(mode="after")
    def _check(self) -> PolicyConfig:
        if self.replicas > 1 and self.runtime == "single":
            raise ValueError(f"replicas={self.replicas} needs runtime: multi")
        return self


class ProblemsConfig(Section):
    name: str = Field("addition", description="Problem set, see `sprawl.problems`.")
    params: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the problem set.")


class MuonConfig(Section):
    """Read when `optimizer.kind` is muon."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(gt=0, lt=100)] = Field(5, description="Newton-Schulz iterations a step.")
    adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw", description="How lr follows a matrix's shape; match_rms_adamw steps as far as AdamW does."
    )


class OptimizerConfig(Section):
    kind: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: hidden matrices by Muon; embeddings, norms, biases and the head by AdamW."
    )
    lr: Annotated[float, Field(gt=0)] = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_norm: Annotated[float, Field(gt=0)] = Field(1.0, description="Global norm clip, before the sign correction.")
    max_bad_steps: Positive = Field(3, description="Refused steps (non-finite gradient) in a row before the run stops.")
    muon: MuonConfig = MuonConfig()


class AnchorConfig(Section):
    enabled: bool = True
    every: Positive = Field(20, description="c: a fire every c optimizer steps.")
    lag: Positive = Field(20, description="K: the newest weights a fire may use are K steps old.")
    fold: Annotated[float, Field(ge=0, lt=1)] = Field(0.25, description="M <- fold*M + (1-fold)*G_anc.")
    blend: Annotated[float, Field(ge=0, le=1)] = Field(
        0.25, description="G = blend*G_comp + (1-blend)*|G_comp|*sign(M)."
    )
    replay: Literal["newest", "matching"] = Field(
        "newest", description="newest batch at forecast weights, or the batch the stale weights generated."
    )
    forecast: Literal["secant", "window", "fit4", "stale"] = Field(
        "secant", description="How stale weights are projected forward, see `sprawl.anchor.forecast`."
    )
    strength: Annotated[float, Field(ge=0)] = Field(
        1.0, description="How far a forecast leaves the newest weights it may see; 0 is stale."
    )
    window: Annotated[int, Field(ge=2)] = Field(
        4, description="Checkpoints, c steps apart, that the baseline of forecast: window grows to."
    )
    blocking: bool = Field(
        False, description="Wait for a due sign map before the next step; needed for bit-identical resume."
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(300.0, description="How long a blocking wait may take.")


class PublishConfig(Section):
    dtype: ServedFormat = Field(
        "bfloat16", description="Format of the served view; scaled ones quantise the matrices of linear layers."
    )
    keyframe_every: Positive = Field(20, description="A version published whole every n versions.")


class CheckpointConfig(Section):
    every: Positive = Field(
        10, description="Master weights and optimizer state every n steps; steps between are replayed."
    )
    whole_every: Positive = Field(
        8,
        description="Master weights whole every n-th time (of the checkpoints that the anchor reads), as lossless "
        "deltas between; 1: always.",
    )
    keep: Positive = Field(
        4, description="Checkpoints kept for resume (the anchor's are kept as long as it needs them)."
    )


class EvaluateConfig(Section):
    every: Positive = Field(50, description="Greedy evaluation at an exact version every n steps, and at the end.")
    problems: Positive = Field(200, description="Held-out problems evaluated.")


class ProbeConfig(Section):
    every: Positive = Field(5, description="Compression-off probe (dense-view KL and entropy) every n steps.")
    rows: Positive = Field(32, description="Sequences the probe reads.")
    gradient_every: Annotated[int, Field(ge=0)] = Field(
        15,
        description="Dense gradient of the whole (first) minibatch, compared with the compressed one, every n steps; "
        "0: never. 15 against 20 steps between fires: every age of a sign map is met.",
    )


class ThreadsConfig(Section):
    trainer: Positive = 1
    island: Positive = 1
    anchor: Positive = 1


class RunConfig(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,40}$")] = Field(
        description="Short name, part of run_id."
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    steps: Positive
    board: str = Field("runs", description="Board URL or directory (fsspec): runs, file:///x, s3://bucket/prefix ...")
    deterministic: bool = Field(False, description="Pin rollouts to exact versions, so that a resume is bit-identical.")
    policy: PolicyConfig
    problems: ProblemsConfig = ProblemsConfig()
    rollout: RolloutConfig = RolloutConfig()
    boundary: BoundaryConfig = BoundaryConfig()
    grpo: GrpoConfig = GrpoConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    anchor: AnchorConfig = AnchorConfig()
    publish: PublishConfig = PublishConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    probe: ProbeConfig = ProbeConfig()
    control: ControlConfig = ControlConfig()
    threads: ThreadsConfig = ThreadsConfig()

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        if self.anchor.enabled:
            for field in ("every", "lag"):
                if getattr(self.anchor, field) % self.checkpoint.every:
                    raise ValueError(
                        f"anchor.{field}={getattr(self.anchor, field)} must be a multiple of "
                        f"checkpoint.every={self.checkpoint.every}: the anchor reads checkpoints"
                    )
            if self.anchor.replay == "matching" and self.anchor.lag <= self.rollout.max_staleness:
                raise ValueError(
                    f"anchor.replay=matching needs anchor.lag={self.anchor.lag} above rollout.max_staleness="
                    f"{self.rollout.max_staleness} (what the held weights sampled must be there when the fire is due)"
                )
        if self.policy.split is not None and len(self.policy.split) != self.policy.stages:
            raise ValueError(
                f"policy.split has {len(self.policy.split)} entries but policy.stages={self.policy.stages}"
            )
        if self.deterministic and self.rollout.feed == "stream":
            raise ValueError(
                "rollout.feed=stream needs deterministic: false (which groups a step trains on depends on the time "
                "they take)"
            )
        if self.deterministic and self.rollout.follow == "eager":
            raise ValueError("rollout.follow=eager needs deterministic: false (exact versions would be overtaken)")
        if self.boundary.codec == "subspace" and not self.anchor.enabled:
            raise ValueError("boundary.codec=subspace needs anchor.enabled: true (the anchor fits its bases)")
        self._check_grpo()
        if self.deterministic and self.anchor.enabled and not self.anchor.blocking:
            raise ValueError("deterministic: true needs anchor.blocking: true (sign maps must arrive at fixed steps)")
        return self

    def _check_grpo(self) -> None:
        grpo, rollout = self.grpo, self.rollout
        if grpo.off_policy.kind != "none" and self.boundary.codec != "dense" and not grpo.off_policy.through_codec:
            raise ValueError(
                f"grpo.off_policy.kind={grpo.off_policy.kind} needs boundary.codec=dense, or "
                "grpo.off_policy.through_codec: true: through a codec the ratio measures the codec"
            )
        if grpo.overlong.buffer is not None and grpo.overlong.buffer > rollout.max_new_tokens:
            raise ValueError(
                f"grpo.overlong.buffer={grpo.overlong.buffer} is above rollout.max_new_tokens={rollout.max_new_tokens}"
            )
        if grpo.minibatches > rollout.prompts:
            raise ValueError(f"grpo.minibatches={grpo.minibatches} is above rollout.prompts={rollout.prompts}")
        if grpo.refill_rounds and self.deterministic and rollout.max_staleness > 1:
            raise ValueError(
                "grpo.refill_rounds with deterministic: true needs rollout.max_staleness <= 1 "
                "(islands that went on for a later step cannot sample the earlier one's version again)"
            )


def parse_config(data: Any, source: str = "config") -> RunConfig:
    """Validate a mapping. Raises `ConfigError` with one line that names every wrong field."""
    return validated(RunConfig, data, source, "run settings")


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read and validate a run YAML. Raises `ConfigError` (missing file, YAML syntax, wrong fields)."""
    data = read_yaml(path, "run config", "see configs/ for the ones that ship")
    if overrides and isinstance(data, dict):
        data = apply_overrides(data, overrides)
    return parse_config(data, str(path))
