"""Small results of the phases of a step: what a terminal line shows and a flow run ends with. No tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from sprawl.board.receipts import PublishReceipt, Receipt

__all__ = ["CollectReceipt", "FinishReceipt", "PublishReceipt", "Receipt", "StartReceipt", "TrainReceipt"]


@dataclass(frozen=True)
class StartReceipt(Receipt):
    """What `RunSession.prepare` found: where the run stands and what will happen next."""

    run_id: str
    head_step: int  # last committed optimizer step, 0 for a new run
    steps: int  # optimizer steps the run will have when finished
    resumed: bool
    replayed: int  # steps recomputed from stored rollouts on resume
    parameters: int
    boundary: str  # e.g. "prf: 6 of 128 channels at 7 boundaries"


@dataclass(frozen=True)
class CollectReceipt(Receipt):
    step: int
    samples: int
    reward: float
    tokens: int
    versions: list[int]  # versions that sampled, ascending
    seconds: float  # wall seconds the caller waited
    reused: bool  # the batch was already on the board


@dataclass(frozen=True)
class TrainReceipt(Receipt):
    step: int
    loss: float
    grad_norm: float
    applied: bool
    sign_fire: int | None
    seconds: float
    skipped: bool  # this step was already trained (a retry)


@dataclass(frozen=True)
class FinishReceipt(Receipt):
    run_id: str
    steps: int
    versions_verified: int
    violations: list[str] = field(default_factory=list)
