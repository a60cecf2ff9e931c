"""A small study and the ledgers its runs would leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sprawl.report.data import RunData
from sprawl.study.config import StudyConfig, parse_study
from sprawl.study.plan import Cell
from tests.report.plausible import make_run

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "configs" / "tiny.yaml")
_KIND = {"prf-anchor": "prf", "prf": "no_anchor", "dense": "dense"}


def study_data(**changes: Any) -> dict[str, Any]:
    return {
        "name": "three",
        "title": "Three arms",
        "base": BASE,
        "steps": 40,
        "seeds": [7, 8],
        "arms": [
            {"name": "prf-anchor", "label": "prf + anchor", "colour": "blue", "steps": 60},
            {"name": "prf", "overrides": {"anchor.enabled": False}},
            {"name": "dense", "overrides": {"boundary.codec": "dense", "anchor.enabled": False}},
        ],
        "groups": [{"name": "all", "title": "All of them", "arms": ["*"]}],
    } | changes


def make_study(**changes: Any) -> StudyConfig:
    return parse_study(study_data(**changes))


def ledger(cell: Cell, steps: int | None = None) -> RunData:
    """What the cell's run would leave; only its first `steps` steps when given."""
    kind = _KIND[cell.arm.name]
    data = make_run(kind, steps=cell.config.steps, run_id=cell.run_id, seed=cell.seed)
    data = replace(data, run=data.run.model_copy(update={"config": cell.config.model_dump(mode="json")}))
    if steps is None:
        return data
    return replace(
        data,
        steps=data.steps[:steps],
        evaluations=data.evaluations[:1],
        fires=tuple(fire for fire in data.fires if fire.step <= steps),
        events=tuple(event for event in data.events if event.step <= steps and event.kind == "start"),
    )
