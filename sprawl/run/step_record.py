"""From what a step measured to its ledger record. Pure."""

from __future__ import annotations

import time

from sprawl.board.records import ControlRecord, StepRecord, Views, Wire
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.run.receipts import PublishReceipt
from sprawl.train.trainer import StepStats


def step_record(
    step: int,
    batch: RolloutBatch,
    stats: StepStats,
    receipt: PublishReceipt,
    *,
    epoch: int,
    parameters: int,
    sign_fire: int | None,
    sign_weights: int | None,
    sign_bytes: int,
    basis_bytes: int,
    seconds: dict[str, float],
    control: ControlRecord | None,
) -> StepRecord:
    """The record of optimizer step `step`. `sign_fire`: the fire whose sign map was in force, `sign_weights`: the step
    of the newest weights that fire used. `sign_bytes`: size of the sign map that arrived for the step, 0 when none did;
    `basis_bytes` the same of the subspace codec's bases."""
    lag = step - 1 - batch.version_start.float()
    return StepRecord(
        step=step,
        epoch=epoch,
        version=receipt.version,
        finished_at=time.time(),
        reward=float(batch.rewards.mean()),
        reward_std=float(batch.rewards.std()),
        groups=len(batch.islands),
        zero_advantage_groups=stats.zero_advantage_groups,
        response_tokens=batch.response_tokens,
        response_length=batch.response_tokens / batch.samples,
        entropy=Views(compression=stats.entropy, dense=stats.entropy_dense),
        kl=Views(compression=stats.kl, dense=stats.kl_dense),
        mismatch=stats.mismatch,
        mismatch_dense=stats.mismatch_dense,
        ratio_max_error=stats.ratio_max_error,
        clip_share=stats.clip_share,
        loss=stats.loss,
        grad_norm=stats.grad_norm,
        applied=stats.applied,
        sign_fire=sign_fire,
        sign_age=None if sign_fire is None else step - sign_fire,
        sign_weights_age=None if sign_weights is None else step - sign_weights,
        sign_agreement=stats.sign_agreement,
        gradient=stats.gradient,
        dense_step=stats.dense_step,
        updates=stats.updates,
        off_policy_cut=stats.off_policy_cut,
        truncated_share=None if batch.truncated is None else float(batch.truncated.float().mean()),
        groups_sampled=None if batch.draws is None else batch.draws.groups,
        reward_sampled=None if batch.draws is None else batch.draws.reward,
        staleness=float(lag.mean()),
        staleness_max=int(lag.max()),
        boundary=Wire(sent=stats.wire.sent, dense=stats.wire.dense),
        boundary_padding=stats.wire.padding,
        probe_bytes=stats.probe_bytes,
        basis_bytes=basis_bytes,
        delta=Wire(sent=receipt.sent_bytes, dense=receipt.full_bytes),
        sign=Wire(sent=sign_bytes, dense=4 * parameters if sign_bytes else 0),
        changed_share=receipt.changed_share,
        kind="keyframe" if receipt.kind == "keyframe" else "delta",
        seconds={name: round(value, 6) for name, value in seconds.items()},
        islands={name: batch.islands.count(name) for name in sorted(set(batch.islands))},
        control=control,
    )
