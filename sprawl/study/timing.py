"""Seconds from runs that had the machine to themselves, put in place of those of runs that shared it. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sprawl.report.data import RunData
from sprawl.study.config import StudyConfig
from sprawl.study.plan import Cell, timing_names


def pace(data: RunData) -> float:
    """Seconds a step: median of the second half of a finished short run. NaN for one that has not finished."""
    if not data.finished:
        return math.nan
    seconds = [record.seconds.get("total", math.nan) for record in data.steps]
    return statistics.median(seconds[len(seconds) // 2 :])


def with_measured_seconds(
    study: StudyConfig, known: Mapping[str, RunData], cells: Sequence[Cell], timing: Sequence[Cell]
) -> dict[str, RunData]:
    """`known`, every step of the runs of `cells` as long as the short run says that times their arm.

    An arm whose short run is missing has NaN seconds, which no table and no figure shows: what was measured beside
    other work never stands next to what was not. Without `timing` the runs keep their own.
    """
    if not timing:
        return dict(known)
    paces = {cell.arm.name: pace(known[cell.run_id]) for cell in timing if cell.run_id in known}
    names = timing_names(study)
    of = {cell.run_id: paces.get(names[cell.arm.name], math.nan) for cell in cells}
    return {run_id: _with_seconds(data, of[run_id]) if run_id in of else data for run_id, data in known.items()}


def _with_seconds(data: RunData, total: float) -> RunData:
    steps = tuple(record.model_copy(update={"seconds": {**record.seconds, "total": total}}) for record in data.steps)
    return replace(data, steps=steps)
