"""Ledger records: the immutable JSON a run leaves on its board, and the only source of every reported number.

Readers ignore unknown fields (a newer writer may add some) and refuse unknown format versions.
Units are in the field descriptions; "nats/token" values are means over response tokens.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

FORMAT = 1


class Record(BaseModel):
    # Refused steps have non-finite norms: written as strings, because JSON has no NaN, and read back as floats.
    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")

    format: int = FORMAT

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: int) -> int:
        if value != FORMAT:
            raise ValueError(f"format version {value} is not understood by this release (knows {FORMAT})")
        return value


class RunRecord(Record):
    """run.json: written once, exclusively, when the run is created."""

    run_id: str
    created_at: float = Field(description="Unix seconds.")
    config: dict[str, Any] = Field(description="The RunConfig, complete with defaults.")
    base_digest: str = Field(description="Root digest of version 0.")
    parameters: int = Field(description="Number of master parameters.")
    sprawl_version: str
    host: dict[str, Any] = Field(default_factory=dict, description="Cores, platform, torch version.")


class Views(BaseModel):
    """A quantity read through the boundary codec and, where probed, without it."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")

    compression: float
    dense: float | None = Field(None, description="None on steps without a compression-off probe.")


class Wire(BaseModel):
    """Bytes that crossed one kind of wire in one step, against what dense would have cost there."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    sent: int
    dense: int


class GradientViews(BaseModel):
    """The gradient through the codec against the dense one of the same samples, before the optimizer."""

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")

    cosine: float = Field(description="Between compressed and dense gradient, over all parameters as one vector.")
    norm_ratio: float = Field(description="|compressed| / |dense|, before clipping.")
    sign_agreement: float = Field(description="Share of elements non-zero in both whose signs agree.")
    corrected_cosine: float = Field(description="Between what the optimizer gets (sign-corrected) and dense.")
    dense_sign_agreement: float | None = Field(
        None, description="Share of non-zero dense gradient elements that agree with M; None without a sign map."
    )


class StepRecord(Record):
    """metrics/steps/<step>: one optimizer step. `step` counts from 1; step t turns version t-1 into version t."""

    step: int
    epoch: int = Field(description="Fencing epoch of the writer.")
    version: int = Field(description="Version published by this step.")
    finished_at: float
    reward: float = Field(description="Mean verifier score over the batch (sample mean).")
    reward_std: float
    groups: int
    zero_advantage_groups: int
    response_tokens: int
    response_length: float = Field(description="Mean response tokens per sample.")
    entropy: Views = Field(description="nats/token, entropy of the policy's next-token distribution.")
    kl: Views = Field(description="nats/token, KL(policy || base) summed over the vocabulary, along the samples.")
    mismatch: float = Field(description="nats/token, mean |log p_sampler - log p_trainer(compression view)|.")
    mismatch_dense: float | None = Field(None, description="The same against the dense view; None without a probe.")
    ratio_max_error: float = Field(description="max |ratio - 1| on the step's first update; 0 by construction.")
    clip_share: float = Field(description="Share of response tokens whose ratio was clipped.")
    loss: float = Field(description="Mean over the step's updates.")
    grad_norm: float = Field(description="Global L2 norm before clipping and sign correction (last update).")
    applied: bool = Field(description="False when the gradient was not finite and the step was refused.")
    sign_fire: int | None = Field(None, description="Step of the fire whose sign map corrected this gradient.")
    sign_age: int | None = Field(None, description="Optimizer steps since that fire.")
    sign_agreement: float | None = Field(None, description="Share of non-zero gradient elements that agree with M.")
    gradient: GradientViews | None = Field(None, description="None on steps without a gradient probe.")
    dense_step: bool = Field(False, description="The step ran through dense boundaries (boundary.dense_every).")
    updates: int = Field(1, description="Optimizer updates applied: inner epochs x minibatches, fewer when refused.")
    off_policy_cut: float | None = Field(
        None, description="Share of response tokens whose off-policy weight was truncated or masked; None without one."
    )
    truncated_share: float | None = Field(None, description="Share of samples that ended at the token limit.")
    groups_sampled: int | None = Field(None, description="Groups sampled for the batch; None without dynamic sampling.")
    reward_sampled: float | None = Field(None, description="Mean score over all of those; `reward` is the batch's.")
    staleness: float = Field(description="Mean of (step - 1 - version that sampled).")
    staleness_max: int
    boundary: Wire = Field(description="Activations and gradients over all stage boundaries.")
    boundary_padding: int = Field(0, description="Bytes of `boundary.sent` that stand for no token.")
    probe_bytes: int = Field(0, description="What this step's probes send over the boundaries; not in `boundary`.")
    basis_bytes: int = Field(0, description="Bases of the subspace codec received at this step.")
    delta: Wire = Field(description="Published version; dense = the full served view.")
    sign: Wire = Field(description="Sign map received at this step; dense = fp32 gradients. Zero when none came.")
    changed_share: float = Field(description="Share of served weights whose bits changed.")
    kind: Literal["keyframe", "delta"] = "delta"
    seconds: dict[str, float] = Field(description="Wall seconds per phase: rollout_wait, train, publish, ...; total.")
    islands: dict[str, int] = Field(default_factory=dict, description="Groups sampled by each island.")


class EvaluationRecord(Record):
    """metrics/evaluations/<version>: greedy decoding at an exact version."""

    version: int
    step: int
    problems: int
    correct: int
    accuracy: float
    seconds: float
    finished_at: float
    examples: list[dict[str, Any]] = Field(default_factory=list, description="A few prompt/response/score rows.")


class FireRecord(Record):
    """anchor/fires/<step>: commit record of one anchor fire."""

    step: int = Field(description="The optimizer step at which the fire was due (a multiple of c).")
    newest_step: int = Field(description="Step of the newest weights used; must be <= step - K.")
    checkpoints: list[int] = Field(description="Checkpoint steps read.")
    forecast: str
    replayed_step: int = Field(description="Step whose rollouts were replayed.")
    digest: str = Field(description="blake3 of the packed sign map.")
    bytes: int = Field(description="Size of the packed sign map: one bit a parameter plus the header.")
    header_bytes: int
    parameters: int
    grad_norm: float
    loss: float
    basis_digest: str | None = Field(None, description="blake3 of the boundary bases; only with the subspace codec.")
    basis_bytes: int = 0
    optimizer_steps: int = Field(0, description="Always 0: the anchor never steps an optimizer.")
    seconds: float
    finished_at: float


class EventRecord(Record):
    """metrics/events/<name>: start, resume, island lost, violation ..."""

    kind: str = Field(
        description="attempt, start, resume, finish, island_lost, anchor_lost, island_report, client_report, verify, "
        "violation"
    )
    at: float
    step: int
    message: str
    data: dict[str, Any] = Field(default_factory=dict)


class CheckpointRecord(Record):
    """checkpoints/<step>: commit record of masters and optimizer state after `step`."""

    step: int
    epoch: int
    blobs: dict[str, str] = Field(
        description="Blob name -> blake3: masters, optimizer, codec (if it has state); of a pipeline of processes "
        "<name>-<stage>of<stages>, each what its stage holds."
    )
    bytes: int
    created_at: float


class IslandRecord(Record):
    """islands/<id>: heartbeat, overwritten. Readers treat one older than 3 intervals as lost."""

    island_id: str
    url: str = Field(description="Base URL of the sidecar.")
    state: Literal["starting", "ready", "draining", "failed"]
    applied: int | None = Field(description="Version served now; None before the first.")
    started_at: float
    heartbeat_at: float
    interval_s: float
    pid: int | None = None
    versions_applied: int = Field(0, description="Versions this island has put into service.")
    versions_verified: int = Field(0, description="Of those, rebuilt ones whose root digest equalled the manifest's.")
    last_error: str | None = None


class MirrorRecord(Record):
    """.mirrors/<region>/<id>.json: heartbeat of a relay of the whole board, overwritten. One older than 3 intervals is
    lost. Readers check what a mirror says and fall back to the board, so a stale or false record costs a request."""

    mirror_id: str
    region: str
    url: str = Field(description="Base URL of the relay.")
    started_at: float
    heartbeat_at: float
    interval_s: float
    pid: int | None = None
