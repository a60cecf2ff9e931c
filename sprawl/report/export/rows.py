"""A step as one flat row: what a column is called, and which of them a curve can be drawn of. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sprawl.board.records import EvaluationRecord, StepRecord

Value = float | int | bool | str | None

FLAT = {  # columns that every row has, in this order; after them come seconds/<phase> and islands/<id>
    "step": int,
    "version": int,
    "epoch": int,
    "finished_at": float,
    "reward": float,
    "reward_std": float,
    "reward_sampled": float,
    "groups": int,
    "groups_sampled": int,
    "zero_advantage_groups": int,
    "response_tokens": int,
    "response_length": float,
    "truncated_share": float,
    "entropy/codec": float,
    "entropy/dense": float,
    "kl/codec": float,
    "kl/dense": float,
    "mismatch/codec": float,
    "mismatch/dense": float,
    "ratio_max_error": float,
    "clip_share": float,
    "off_policy_cut": float,
    "loss": float,
    "grad_norm": float,
    "applied": bool,
    "updates": int,
    "dense_step": bool,
    "sign_fire": int,
    "sign_age": int,
    "sign_weights_age": int,
    "sign_agreement": float,
    "gradient/cosine": float,
    "gradient/norm_ratio": float,
    "gradient/sign_agreement": float,
    "gradient/corrected_cosine": float,
    "gradient/dense_sign_agreement": float,
    "staleness": float,
    "staleness_max": int,
    "feed/discarded": int,
    "feed/failed": int,
    "feed/in_flight": int,
    "feed/ready": int,
    "feed/queue_seconds": float,
    "feed/queue_seconds_max": float,
    "control/level": int,
    "control/sign_strength": float,
    "control/lr_scale": float,
    "control/dense": bool,
    "control/probe": bool,
    "control/fire": int,
    "bytes/boundary": int,
    "bytes/boundary_dense": int,
    "bytes/boundary_padding": int,
    "bytes/probe": int,
    "bytes/basis": int,
    "bytes/delta": int,
    "bytes/delta_dense": int,
    "bytes/sign": int,
    "bytes/sign_dense": int,
    "changed_share": float,
    "kind": str,
    "evaluation/accuracy": float,
    "evaluation/problems": int,
    "seconds/total": float,
}

# What identifies a step or says how it was made, and what may be entered long after it: no curve of the step.
NO_CURVE = frozenset(
    {
        "step",
        "version",
        "finished_at",
        "kind",
        "sign_fire",
        "control/fire",
        "evaluation/accuracy",
        "evaluation/problems",
    }
)


def row(record: StepRecord, evaluation: EvaluationRecord | None = None) -> dict[str, Value]:
    """Every number of a step under a flat name; None where it was not measured. `evaluation`: of its version."""
    plain = record.model_dump(exclude={"format", "seconds", "islands"})
    views = {name: plain.pop(name) for name in ("entropy", "kl")}
    wires = {name: plain.pop(name) for name in ("boundary", "delta", "sign")}
    groups = {name: plain.pop(name) or {} for name in ("gradient", "feed", "control")}
    plain["mismatch/codec"] = plain.pop("mismatch")
    plain["mismatch/dense"] = plain.pop("mismatch_dense")
    for name in ("boundary_padding", "probe_bytes", "basis_bytes"):
        plain[f"bytes/{name.removesuffix('_bytes')}"] = plain.pop(name)
    for name, view in views.items():
        plain[f"{name}/codec"], plain[f"{name}/dense"] = view["compression"], view["dense"]
    for name, wire in wires.items():
        plain[f"bytes/{name}"], plain[f"bytes/{name}_dense"] = wire["sent"], wire["dense"]
    for group, values in groups.items():  # of the stream and the controller only what has a column: no lists, no texts
        plain |= {f"{group}/{name}": value for name, value in values.items() if f"{group}/{name}" in FLAT}
    if evaluation is not None:
        plain["evaluation/accuracy"], plain["evaluation/problems"] = evaluation.accuracy, evaluation.problems
    seconds: dict[str, Any] = {f"seconds/{name}": value for name, value in sorted(record.seconds.items())}
    islands: dict[str, Any] = {f"islands/{name}": groups for name, groups in sorted(record.islands.items())}
    plain |= seconds
    return (
        {name: plain.get(name) for name in FLAT}
        | {name: value for name, value in plain.items() if name not in FLAT}
        | islands
    )


def columns(rows: Iterable[dict[str, Value]]) -> list[str]:
    """Names of all columns: those of FLAT, then the others as they first come."""
    names = dict.fromkeys(FLAT)
    for entry in rows:
        names.update(dict.fromkeys(entry))
    return list(names)


def curves(entry: dict[str, Value]) -> dict[str, float]:
    """The numbers of a row that are worth a curve. Not-a-numbers stay: a refused step should show."""
    return {
        name: float(value)
        for name, value in entry.items()
        if name not in NO_CURVE and value is not None and not isinstance(value, str)
    }
