"""What the controller sees of a step: the learning side of its ledger record, nothing that depends on the clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sprawl.board.records import StepRecord


@dataclass(frozen=True)
class Observation:
    """Units as in `StepRecord`; what the step did not measure, or measured as no number, is None.

    mismatch: through the codec; None on dense steps, which say nothing about it.
    entropy: through the codec; None on dense steps. staleness: versions between sampler and trainer.
    dense_sign_agreement: of a gradient probe, with the sign map of `sign_age`.
    """

    step: int
    reward: float
    mismatch: float | None
    entropy: float | None
    mismatch_dense: float | None
    kl_dense: float | None
    staleness: float
    sign_fire: int | None
    sign_age: int | None
    dense_sign_agreement: float | None


def observe(record: StepRecord) -> Observation:
    compressed = not record.dense_step
    return Observation(
        step=record.step,
        reward=record.reward,
        mismatch=_number(record.mismatch) if compressed else None,
        entropy=_number(record.entropy.compression) if compressed else None,
        mismatch_dense=_number(record.mismatch_dense),
        kl_dense=_number(record.kl.dense),
        staleness=record.staleness,
        sign_fire=record.sign_fire,
        sign_age=record.sign_age,
        dense_sign_agreement=_number(record.gradient.dense_sign_agreement) if record.gradient else None,
    )


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
