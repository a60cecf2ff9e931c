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


class StepFeed(BaseModel):
    """The stream of groups when the step's batch was taken from it (`rollout.feed: stream`)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompts: list[int] = Field(description="Number of the prompt of each group; a number is trained once.")
    discarded: int = Field(description="Groups given up since the step before: a token of theirs was too old.")
    failed: int = Field(description="Requests that ended without a group since then; each is repeated.")
    in_flight: int = Field(description="Groups being sampled.")
    ready: int = Field(description="Groups finished and left for later steps.")
    queue_seconds: float = Field(description="How long the batch's groups had been finished, mean.")
    queue_seconds_max: float = Field(description="The same, longest.")


class ControlRecord(BaseModel):
    """What the drift controller made a step do, and all that its next decision needs to know of the past.

    It stands in the step's record and in the manifest of its version: a resumed run replays what was done, and decides
    the next step from the same facts. The defaults are a step as configured.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    level: int = Field(0, description="0: as configured; 1 to 4: see `sprawl.control.levels`.")
    since: int = Field(0, description="First step of this level.")
    quiet: int = Field(0, description="Quiet steps in a row under it.")
    eased: bool = Field(False, description="The last move was downwards.")
    relapses: int = Field(0, description="How often a move downwards had to be taken back.")
    best_reward: float | None = Field(None, description="Highest 10-step mean of the reward so far.")
    best_step: int | None = Field(None, description="Last of those ten steps.")
    entropy: float | None = Field(None, description="nats/token through the codec, median of the first ten steps.")
    sign_strength: float = Field(1.0, description="Share of the configured weight of sign(M) in this step's gradient.")
    lr_scale: float = Field(1.0, description="Factor on optimizer.lr.")
    dense: bool = Field(False, description="The step was made a dense one.")
    probe: bool = Field(False, description="The dense view was probed, due or not.")
    fire: int | None = Field(None, description="Step of a fire between the regular ones that this step asked for.")
    symptoms: dict[str, str] = Field(
        default_factory=dict, description="Kind -> what was seen, of those at their limit."
    )
    verdict: str | None = Field(None, description="Why the run was stopped before this step.")


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
    sign_weights_age: int | None = Field(None, description="Optimizer steps since the newest weights that fire used.")
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
    staleness: float = Field(
        description="Mean over groups of (step - 1 - version that sampled the group's oldest token), in versions."
    )
    staleness_max: int
    feed: StepFeed | None = Field(None, description="None where rollouts are sampled step by step.")
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
    control: ControlRecord | None = Field(None, description="None without the drift controller.")


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

    step: int = Field(description="The optimizer step at which the fire was due (a multiple of c, if scheduled).")
    kind: Literal["scheduled", "extra"] = Field(
        "scheduled", description="extra: brought forward by the drift controller."
    )
    newest_step: int = Field(description="Step of the newest weights used; must be <= step - K.")
    checkpoints: list[int] = Field(description="Checkpoint steps used, newest first.")
    checkpoint_bytes: int = Field(0, description="Bytes of masters read from the board for it.")
    forecast: str
    replayed_step: int = Field(description="Step whose rollouts were replayed.")
    replayed_versions: list[int] | None = Field(
        None, description="Oldest and newest version that sampled what was replayed; None: nothing matched."
    )
    replayed_samples: int | None = Field(None, description="Samples replayed.")
    digest: str = Field(description="blake3 of the packed sign map.")
    state_digest: str | None = Field(
        None, description="blake3 of M after this fire, as it is on the board; None in records of older releases."
    )
    bytes: int = Field(description="Size of the packed sign map: one bit a parameter plus the header.")
    header_bytes: int
    parameters: int
    grad_norm: float
    loss: float
    basis_digest: str | None = Field(None, description="blake3 of the boundary bases; only with the subspace codec.")
    basis_bytes: int = 0
    has_direction: bool = Field(
        True, description="False while M is zero everywhere: the map says nothing and corrects nothing."
    )
    optimizer_steps: int = Field(
        0,
        description="Steps of any torch optimizer that the process took during the fire, counted; 0 in a correct run.",
    )
    weights_before: str | None = Field(None, description="Root digest of the replayed weights before the replay ...")
    weights_after: str | None = Field(None, description="... and after it; the same in a correct run.")
    seconds: float
    finished_at: float


class FireRequest(Record):
    """anchor/requests/<step>: a fire between the regular ones. It is there before version `step` is committed."""

    step: int = Field(description="When the fire is due: checkpoints exist at this distance, c does not divide it.")
    requested_at: int = Field(description="The step that asked for it.")
    reason: str


class EventRecord(Record):
    """metrics/events/<name>: start, resume, island lost, violation ..."""

    kind: str = Field(
        description="attempt, start, resume, finish, island_lost, anchor_lost, island_report, client_report, verify, "
        "violation, control, verdict"
    )
    at: float
    step: int
    message: str
    data: dict[str, Any] = Field(default_factory=dict)


class MastersBlob(BaseModel):
    """What a blob of masters is."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    root: str = Field(description="Root digest of the tensors, of a delta: after applying it.")
    base: int | None = Field(None, description="The blob is a delta against the one of this checkpoint; None: whole.")
    whole_bytes: int = Field(description="Size of the tensors.")


class PromotionRecord(Record):
    """promotions/<version>: what a person decided about a version. Written once; a decision stands."""

    version: int
    approved: bool
    root_digest: str = Field(description="Of the version's manifest when it was decided: what was approved, exactly.")
    by: str = Field(description="Who decided, as they wrote it.")
    reason: str = ""
    accuracy: float | None = Field(None, description="Greedy accuracy that was shown to them; None: not evaluated.")
    flow_run: str | None = Field(None, description="Id of the Prefect flow run that asked.")
    at: float = Field(description="Unix seconds.")


class CheckpointRecord(Record):
    """checkpoints/<step>: commit record of masters and optimizer state after `step`."""

    step: int
    epoch: int
    blobs: dict[str, str] = Field(
        description="Blob name -> blake3: masters, optimizer, codec (if it has state); of a pipeline of processes "
        "<name>-<stage>of<stages>, each what its stage holds."
    )
    bytes: int
    masters: dict[str, MastersBlob] = Field(
        default_factory=dict, description="Of the blobs of masters by name; those not named here are whole."
    )
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
