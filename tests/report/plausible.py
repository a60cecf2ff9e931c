"""Ledger records of runs that look like real ones. Deterministic in the arguments."""

from __future__ import annotations

import random
from typing import Any

from sprawl.board.ledger import Ledger
from sprawl.board.records import (
    ControlRecord,
    EvaluationRecord,
    EventRecord,
    FireRecord,
    IslandRecord,
    RunRecord,
    StepRecord,
    Views,
    Wire,
)
from sprawl.board.store import Store
from sprawl.config import apply_overrides, parse_config
from sprawl.report.data import RunData

T0 = 1_800_000_000.0
PARAMETERS = 2_101_003
FULL = 2 * PARAMETERS


def make_config(*overrides: str, steps: int = 100) -> dict[str, Any]:
    data = {"name": "tiny", "steps": steps, "policy": {"base": "configs/base"}, "optimizer": {"lr": 1e-5}}
    return parse_config(apply_overrides(data, list(overrides))).model_dump(mode="json")


def make_run_record(*overrides: str, steps: int = 100, run_id: str = "tiny-0001") -> RunRecord:
    return RunRecord(
        run_id=run_id,
        created_at=T0,
        config=make_config(*overrides, steps=steps),
        base_digest="ab" * 32,
        parameters=PARAMETERS,
        sprawl_version="0.1.0",
        host={"cores": 2},
    )


def make_step(step: int, **changes: Any) -> StepRecord:
    """A quiet compressed step; `changes` replace fields."""
    fields: dict[str, Any] = {
        "step": step,
        "epoch": 1,
        "version": step,
        "finished_at": T0 + 30 + 2.0 * step,
        "reward": 0.5,
        "reward_std": 0.4,
        "groups": 16,
        "zero_advantage_groups": 2,
        "response_tokens": 1024,
        "response_length": 4.0,
        "entropy": Views(compression=1.3),
        "kl": Views(compression=3.0),
        "mismatch": 4.3,
        "ratio_max_error": 0.0,
        "clip_share": 0.0,
        "loss": 0.01,
        "grad_norm": 30.0,
        "applied": True,
        "staleness": 1.0,
        "staleness_max": 1,
        "boundary": Wire(sent=470_000, dense=10_000_000),
        "delta": Wire(sent=400_000, dense=FULL),
        "sign": Wire(sent=0, dense=0),
        "changed_share": 0.09,
        "seconds": {"rollout_wait": 0.5, "train": 1.0, "publish": 0.2, "total": 2.0},
        "islands": {"island-0": 8, "island-1": 8},
    }
    return StepRecord(**(fields | changes))


def make_fire(step: int, **changes: Any) -> FireRecord:
    fields: dict[str, Any] = {
        "step": step,
        "newest_step": step - 20,
        "checkpoints": sorted({max(0, step - 40), step - 20}),
        "forecast": "secant",
        "replayed_step": step,
        "digest": "cd" * 32,
        "bytes": -(-PARAMETERS // 8) + 120,
        "header_bytes": 120,
        "parameters": PARAMETERS,
        "grad_norm": 2.0,
        "loss": 0.02,
        "seconds": 3.1,
        "finished_at": T0 + 33 + 2.0 * step,
    }
    return FireRecord(**(fields | changes))


def make_island(island_id: str, **changes: Any) -> IslandRecord:
    fields: dict[str, Any] = {
        "island_id": island_id,
        "url": "http://127.0.0.1:4711",
        "state": "ready",
        "applied": 100,
        "started_at": T0,
        "heartbeat_at": T0 + 240,
        "interval_s": 2.0,
        "versions_applied": 101,
        "versions_verified": 101,
    }
    return IslandRecord(**(fields | changes))


def make_event(kind: str, step: int, message: str = "", **data: Any) -> EventRecord:
    return EventRecord(kind=kind, at=T0 + 31 + 2.0 * step, step=step, message=message or kind, data=data)


def make_evaluation(version: int, accuracy: float) -> EvaluationRecord:
    return EvaluationRecord(
        version=version,
        step=version,
        problems=200,
        correct=round(200 * accuracy),
        accuracy=accuracy,
        seconds=1.5,
        finished_at=T0 + 32 + 2.0 * version,
        examples=[{"prompt": "12+34=", "response": "046", "score": 1.0}, {"prompt": "9+<9=", "response": "810"}],
    )


def make_run(arm: str = "prf", steps: int = 100, run_id: str = "tiny-0001", seed: int = 0) -> RunData:
    """A finished, clean run: arm `prf` (with anchor), `no_anchor` or `dense`."""
    rng = random.Random(seed)
    overrides = {
        "prf": [],
        "no_anchor": ["anchor.enabled=false"],
        "dense": ["anchor.enabled=false", "boundary.codec=dense"],
    }[arm]
    dense, anchored = arm == "dense", arm == "prf"
    records = []
    for step in range(1, steps + 1):
        gain = {"prf": max(0.0, (step - 20) / 80) * 0.4, "no_anchor": 0.0, "dense": min(0.45, step / 60 * 0.45)}[arm]
        probe = step % 5 == 0
        dense_entropy = 0.26 - 0.0011 * step + rng.gauss(0, 0.004)
        dense_kl = 0.0006 * step
        fire = step // 20 * 20 - 20 if step >= 40 else (20 if step > 20 else None)
        fire = step // 20 * 20 or None if anchored and step % 20 else fire
        fresh = anchored and step % 20 == 1 and step > 20
        seconds = {"rollout_wait": 0.3 + rng.random() * 0.3, "train": 0.95 + rng.random() * 0.1, "publish": 0.15}
        seconds |= {
            "anchor_wait": 1.0 if step % 20 == 1 and step > 20 else 0.0,
            "checkpoint": 0.2 if step % 10 == 0 else 0.0,
        }
        records.append(
            make_step(
                step,
                reward=min(1.0, max(0.0, 0.39 + gain + rng.gauss(0, 0.035))),
                entropy=Views(
                    compression=dense_entropy if dense else 1.29 + rng.gauss(0, 0.02),
                    dense=dense_entropy if probe else None,
                ),
                kl=Views(compression=dense_kl if dense else 2.9 + rng.gauss(0, 0.1), dense=dense_kl if probe else None),
                mismatch=3e-4 if dense else 4.3 + 0.0004 * step + rng.gauss(0, 0.07),
                mismatch_dense=3e-4 + rng.random() * 1e-4 if probe else None,
                grad_norm=(2.0 if dense else 36.0) * rng.lognormvariate(0, 0.2),
                sign_fire=fire if anchored else None,
                sign_age=step - fire if anchored and fire else None,
                sign_agreement=0.5 + 0.03 * 0.9 ** (step % 20) + rng.gauss(0, 0.001) if anchored and fire else None,
                staleness=max(0.0, min(1.0, rng.gauss(0.92, 0.05))),
                boundary=Wire(sent=9_800_000 if dense else 470_000 + rng.randrange(5000), dense=9_800_000),
                delta=Wire(sent=FULL + 9000 if step % 20 == 0 else round(FULL * rng.uniform(0.085, 0.11)), dense=FULL),
                kind="keyframe" if step % 20 == 0 else "delta",
                sign=Wire(sent=PARAMETERS // 8 + 121, dense=4 * PARAMETERS) if fresh else Wire(sent=0, dense=0),
                changed_share=rng.uniform(0.075, 0.11),
                seconds=seconds | {"total": sum(seconds.values()) + 0.08, "rollout": 0.8 + rng.random() * 0.2},
            )
        )
    evaluations = [
        make_evaluation(version, accuracy)
        for version, accuracy in zip(
            range(0, steps + 1, max(1, steps // 4)),
            {"prf": [0.12, 0.13, 0.4, 0.7, 0.91], "no_anchor": [0.12] * 5, "dense": [0.5, 0.8, 0.95, 1.0, 1.0]}[arm],
            strict=False,
        )
    ]
    events = [
        make_event("start", 0, "2 islands, anchor, 7 boundaries"),
        make_event("resume", 43, "resumed at step 43, replayed 3 steps"),
        *(
            make_event("island_report", steps, island_id=f"island-{i}", versions_applied=101, versions_verified=101)
            for i in range(2)
        ),
        make_event("verify", steps, "every version rebuilds bit for bit", checked=steps + 1, problems=[]),
        make_event("finish", steps, "finished"),
    ]
    return RunData.of(
        make_run_record(*overrides, steps=steps, run_id=run_id),
        records,
        evaluations,
        [make_fire(step) for step in range(20, steps + 1, 20)] if anchored else [],
        events,
        [make_island("island-0"), make_island("island-1", state="draining")],
    )


def with_control(data: RunData) -> RunData:
    """The run as if its drift controller had acted on steps 30 to 39 and asked for a fire at step 50."""

    def control(step: int) -> ControlRecord:
        if not 30 <= step < 40:
            return ControlRecord(since=40 if step >= 40 else 0, eased=step >= 40)
        symptoms = {"speed": "the dense view moves 0.05 nats/token a version (step 29)"}
        return ControlRecord(
            level=2, since=30, lr_scale=0.5, sign_strength=0.4, dense=step == 35, fire=50, symptoms=symptoms
        )

    config = data.run.config | {"control": data.run.config["control"] | {"enabled": True}}
    return RunData.of(
        data.run.model_copy(update={"config": config}),
        [record.model_copy(update={"control": control(record.step)}) for record in data.steps],
        data.evaluations,
        [*data.fires, *([make_fire(50, kind="extra")] if data.last_step >= 50 else [])],
        data.events,
        data.islands,
    )


def put(store: Store, data: RunData) -> None:
    """Write a whole run to a board."""
    ledger = Ledger(store, data.run.run_id)
    ledger.create_run(data.run)
    for record in data.steps:
        ledger.write_step(record)
    for evaluation in data.evaluations:
        ledger.write_evaluation(evaluation)
    for fire in data.fires:
        ledger.write_fire(fire)
    for event in data.events:
        ledger.write_event(event)
    for island in data.islands:
        ledger.heartbeat(island)
