"""The numbers of a run, computed from its ledger and nothing else. Pure; every value is JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sprawl.board.records import (
    EvaluationRecord,
    EventRecord,
    FireRecord,
    GradientViews,
    IslandRecord,
    RunRecord,
    StepRecord,
)
from sprawl.report.data import RunData
from sprawl.report.numbers import first_mean, last_mean, line_fit, mean, median, ratio
from sprawl.report.stream import idle_seconds, stream_numbers
from sprawl.report.violations import run_checks

_ESSENTIALS = (
    "name",
    "seed",
    "steps",
    "policy.base",
    "policy.stages",
    "problems.name",
    "rollout.prompts",
    "rollout.samples",
    "rollout.max_staleness",
    "rollout.feed",
    "boundary.codec",
    "boundary.ratio",
    "boundary.bits",
    "boundary.dense_every",
    "grpo.loss",
    "grpo.aggregation",
    "grpo.epochs",
    "grpo.minibatches",
    "optimizer.lr",
    "anchor.enabled",
    "anchor.every",
    "anchor.lag",
    "anchor.fold",
    "anchor.blend",
    "anchor.forecast",
    "publish.dtype",
    "publish.keyframe_every",
)


def summarise(
    run: RunRecord,
    steps: Sequence[StepRecord],
    evaluations: Sequence[EvaluationRecord],
    fires: Sequence[FireRecord],
    events: Sequence[EventRecord],
    islands: Sequence[IslandRecord],
    *,
    finished: bool | None = None,
) -> dict[str, Any]:
    """Every number the report shows. Records may come in any order; what cannot be known yet is None.

    `first` and `last` are means over the first 10 and the last 20 steps. `finished` overrides what the ledger's
    finish event says, for a caller that is about to write it.
    """
    return summarise_data(RunData.of(run, steps, evaluations, fires, events, islands), finished=finished)


def summarise_data(data: RunData, *, finished: bool | None = None) -> dict[str, Any]:
    """`summarise` for records that are already together."""
    steps, checks = data.steps, run_checks(data, finished)
    newest_evaluation = data.evaluations[-1] if data.evaluations else None
    deltas = [record for record in steps if record.version >= 1]
    patches = [record for record in deltas if record.kind == "delta"]
    codec = data.codec_steps
    mismatch = [record.mismatch for record in codec]
    fit = line_fit([record.step for record in codec], mismatch)
    return {
        "run_id": data.run.run_id,
        "finished": data.finished if finished is None else finished,
        "steps": data.since - 1 + len({record.step for record in steps}),
        "steps_planned": data.setting("steps"),
        "reward_first10": first_mean([record.reward for record in steps]),
        "reward_last20": last_mean([record.reward for record in steps]),
        "greedy_accuracy": newest_evaluation.accuracy if newest_evaluation else None,
        "greedy_version": newest_evaluation.version if newest_evaluation else None,
        "accuracy_by_version": {str(record.version): record.accuracy for record in data.evaluations},
        "mismatch_first": first_mean(mismatch),
        "mismatch_last": last_mean(mismatch),
        "mismatch_slope": fit[0] if fit else None,
        "mismatch_dense": mean(record.mismatch_dense for record in steps),
        "entropy": {
            "compression": _ends([record.entropy.compression for record in codec]),
            "dense": _ends([record.entropy.dense for record in steps]),
        },
        "kl": {
            "compression": _ends([record.kl.compression for record in codec]),
            "dense": _ends([record.kl.dense for record in steps]),
        },
        "grad_norm_median": median(record.grad_norm for record in steps),
        "fires": sum(record.kind == "scheduled" for record in data.fires),
        "fires_brought_forward": sum(record.kind == "extra" for record in data.fires),
        "control_steps": sum(record.control is not None and record.control.level > 0 for record in steps),
        "control_level_max": max((record.control.level for record in steps if record.control), default=None),
        "verdict": next((event.message for event in reversed(data.events) if event.kind == "verdict"), None),
        "anchor_newest_step_lag_min": min((record.step - record.newest_step for record in data.fires), default=None),
        "sign_agreement_mean": mean(record.sign_agreement for record in steps),
        "gradient_probe": {
            name: _ends([getattr(record.gradient, name) if record.gradient else None for record in steps])
            for name in GradientViews.model_fields
        },
        "dense_steps": sum(record.dense_step for record in steps),
        "probe_bytes": sum(record.probe_bytes for record in steps),
        "off_policy_cut_mean": mean(record.off_policy_cut for record in steps),
        "truncated_share_mean": mean(record.truncated_share for record in steps),
        "groups_sampled": sum(record.groups_sampled or record.groups for record in steps),
        "boundary_bytes_ratio": ratio(
            sum(record.boundary.sent for record in steps), sum(record.boundary.dense for record in steps)
        ),
        "delta_bytes_ratio": ratio(
            sum(record.delta.sent for record in deltas), sum(record.delta.dense for record in deltas)
        ),
        "delta_bytes_ratio_without_keyframes": ratio(
            sum(record.delta.sent for record in patches), sum(record.delta.dense for record in patches)
        ),
        "sign_bytes_ratio": ratio(
            sum(record.sign.sent for record in steps), sum(record.sign.dense for record in steps)
        ),
        "changed_share_mean": mean(record.changed_share for record in steps),
        "versions_published": _versions_published(data),
        "versions_verified": _versions_verified(data),
        "staleness_mean": mean(record.staleness for record in steps),
        "staleness_max": max((record.staleness_max for record in steps), default=None),
        "stream": stream_numbers(data),
        "trainer_idle_seconds": idle_seconds(data),
        "trainer_idle_share": ratio(idle_seconds(data), sum(record.seconds.get("total", 0.0) for record in steps)),
        "islands": len(data.island_ids()),
        "seconds_per_step": median(record.seconds.get("total") for record in steps),
        "training_seconds": sum(record.seconds.get("total", 0.0) for record in steps),
        "wall_seconds": data.last_result() - data.run.created_at,
        "resumed": sum(event.kind == "resume" for event in data.events),
        "refused_steps": sum(not record.applied for record in steps),
        "parameters": data.run.parameters,
        "violations": [violation for check in checks for violation in check.violations],
        "checks": sum(check.applies for check in checks),
        "config": {path: data.setting(path) for path in _ESSENTIALS},
    }


def _ends(values: Sequence[float | None]) -> dict[str, float | None]:
    return {"first": first_mean(values), "last": last_mean(values)}


def _versions_published(data: RunData) -> int:
    """Version 0 has no step record: a first step or an island that serves something proves that it was published."""
    versions = {record.version for record in data.steps}
    if versions or any(record.applied is not None for record in data.islands):
        versions.add(0)
    return len(versions)


def _versions_verified(data: RunData) -> int | None:
    """How many versions the newest verification of the board rebuilt; None before the first."""
    checked = [event.data.get("checked") for event in data.events if event.kind == "verify"]
    return checked[-1] if checked else None
