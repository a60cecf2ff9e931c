"""The state of a run as a short markdown text with one picture, for places that render markdown while it trains."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from sprawl.board.records import EvaluationRecord, FireRecord, RunRecord, StepRecord
from sprawl.report.data import RunData
from sprawl.report.plots import overview
from sprawl.report.stream import stream_rows
from sprawl.report.style import figure_bytes
from sprawl.report.text import duration, number, percent

MAX_BYTES = 200_000


def live_markdown(
    summary: Mapping[str, Any],
    steps: Sequence[StepRecord],
    evaluations: Sequence[EvaluationRecord] = (),
    fires: Sequence[FireRecord] = (),
    *,
    run: RunRecord | None = None,
    max_bytes: int = MAX_BYTES,
) -> str:
    """Table of key numbers and the overview figure as a PNG data URI, at most `max_bytes` long.

    `summary` is `summarise(...)` of the same records. `run` lets the figure know the config; without it the config
    essentials of the summary are used.
    """
    lines = key_number_table(summary)
    if steps:
        data = RunData.of(run or _run_of(summary), steps, evaluations, fires)
        figure = _picture(data, max_bytes - sum(len(line.encode()) + 1 for line in lines) - 100)
        if figure:
            lines += ["", f"![overview](data:image/png;base64,{figure})"]
    return "\n".join(lines) + "\n"


def key_number_table(summary: Mapping[str, Any]) -> list[str]:
    """Lines of a markdown table, two columns."""
    planned = summary["steps_planned"]
    entropy = summary["entropy"]
    rows = [
        ("step", f"{summary['steps']}" + (f" of {planned}" if planned else "")),
        ("reward", f"{number(summary['reward_first10'])} → {number(summary['reward_last20'])}"),
        ("greedy accuracy", number(summary["greedy_accuracy"])),
        ("mismatch, nats/token", f"{number(summary['mismatch_first'])} → {number(summary['mismatch_last'])}"),
        ("entropy, codec", f"{number(entropy['compression']['first'])} → {number(entropy['compression']['last'])}"),
        ("entropy, dense", f"{number(entropy['dense']['first'])} → {number(entropy['dense']['last'])}"),
        ("gradient norm, median", number(summary["grad_norm_median"])),
        ("boundary bytes / dense", percent(summary["boundary_bytes_ratio"])),
        ("version bytes / whole", percent(summary["delta_bytes_ratio"])),
        ("anchor fires", str(summary["fires"])),
        *stream_rows(summary),
        ("islands", str(summary["islands"])),
        ("time a step", duration(summary["seconds_per_step"])),
        ("violations", str(len(summary["violations"]))),
    ]
    lines = [f"**{summary['run_id']}**", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    if summary["violations"]:
        lines += ["", "**Violations**", "", *(f"- {violation}" for violation in summary["violations"][:10])]
    return lines


def _picture(data: RunData, budget: int) -> str | None:
    """The sharpest overview whose base64 fits `budget` bytes; None when not even a coarse one does."""
    figure = overview(data)
    for dpi in (80, 64, 50, 40):
        encoded = base64.b64encode(figure_bytes(figure, dpi=dpi)).decode()
        if len(encoded) <= budget:
            return encoded
    return None


def _run_of(summary: Mapping[str, Any]) -> RunRecord:
    config: dict[str, Any] = {}
    for path, value in summary["config"].items():
        *parents, last = path.split(".")
        section = config
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = value
    return RunRecord(
        run_id=summary["run_id"],
        created_at=0.0,
        config=config,
        base_digest="",
        parameters=summary["parameters"],
        sprawl_version="",
    )
