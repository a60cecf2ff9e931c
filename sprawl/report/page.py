"""The run report: one self-contained HTML page, its figures as files, and the summary as JSON."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sprawl.board.ledger import is_live
from sprawl.errors import SprawlError
from sprawl.report import text
from sprawl.report.control import spells, verdicts
from sprawl.report.data import RunData, load_roots, load_run
from sprawl.report.numbers import ratio, wilson
from sprawl.report.plots import available
from sprawl.report.style import figure_bytes
from sprawl.report.summary import summarise_data
from sprawl.report.violations import run_checks

if TYPE_CHECKING:
    from sprawl.board.store import Store

__all__ = ["ReportPaths", "render_page", "write_report"]


@dataclass(frozen=True)
class ReportPaths:
    index: Path  # index.html
    pngs: list[Path]
    json: Path  # summary.json


@dataclass(frozen=True)
class BigNumber:
    """One tile of the header. `tone` is "", "good" or "bad"."""

    label: str
    value: str
    note: str
    tone: str = ""


def write_report(store: Store, run_id: str, out_dir: str | Path) -> ReportPaths:
    """Write index.html, one PNG a figure and summary.json under `out_dir` (created; files are replaced).

    Raises BoardError when the run is not on the board, SprawlError when `out_dir` cannot be written.
    """
    data = load_run(store, run_id)
    roots = load_roots(store, run_id, [record.version for record in data.steps])
    return write_files(data, Path(out_dir), roots)


def write_files(data: RunData, out: Path, roots: Mapping[int, str] | None = None) -> ReportPaths:
    """`write_report` for a ledger already in memory; `roots` maps versions to root digests."""
    summary = summarise_data(data)
    pngs = {spec.name: figure_bytes(spec.figure(data)) for spec in available(data)}
    page = render_page(data, summary, pngs, roots or {}, now=time.time())
    paths = ReportPaths(out / "index.html", [out / f"{name}.png" for name in pngs], out / "summary.json")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, png in pngs.items():
            (out / f"{name}.png").write_bytes(png)
        paths.json.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
        paths.index.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SprawlError(f"cannot write the report under {out}: {error.strerror}", "choose another --out") from None
    return paths


def render_page(
    data: RunData, summary: Mapping[str, Any], pngs: Mapping[str, bytes], roots: Mapping[int, str], *, now: float
) -> str:
    """The page as one HTML string that loads nothing from anywhere. Pure; `pngs` by figure name."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("sprawl", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=text.number,
        percent=text.percent,
        bytes=text.megabytes,
        duration=text.duration,
        moment=text.moment,
        visible=lambda value: str(value).replace("\n", "⏎"),
    )
    figures = [(spec, base64.b64encode(pngs[spec.name]).decode()) for spec in available(data) if spec.name in pngs]
    return environment.get_template("page.html.j2").render(
        data=data,
        summary=summary,
        state=data.state(now),
        now=now,
        tiles=big_numbers(summary),
        figures=figures,
        checks=run_checks(data, summary["finished"]),
        roots={0: data.run.base_digest, **roots},
        islands=_island_rows(data, now),
        first_use=_first_use(data),
        spells=spells(data),
        verdicts=verdicts(data),
        config=yaml.safe_dump(data.run.config, sort_keys=False),
        wilson=wilson,
        ratio=ratio,
    )


def big_numbers(summary: Mapping[str, Any]) -> list[BigNumber]:
    """What a reader has to know in ten seconds."""
    number, percent = text.number, text.percent
    slope = summary["mismatch_slope"]
    violations, checks = len(summary["violations"]), summary["checks"]
    version = summary["greedy_version"]
    return [
        BigNumber(
            "reward",
            f"{number(summary['reward_first10'])} → {number(summary['reward_last20'])}",
            "first 10 → last 20 steps",
        ),
        BigNumber(
            "greedy accuracy",
            number(summary["greedy_accuracy"]),
            "not evaluated yet" if version is None else f"version {version}",
        ),
        BigNumber(
            "mismatch",
            number(summary["mismatch_last"]),
            "nats/token" + (f", slope {text.signed(slope)} a step" if slope is not None else ""),
        ),
        BigNumber("boundary bytes", percent(summary["boundary_bytes_ratio"]), "of dense"),
        BigNumber(
            "version bytes",
            percent(summary["delta_bytes_ratio"]),
            f"of whole views; {percent(summary['delta_bytes_ratio_without_keyframes'])} without keyframes",
        ),
        BigNumber("violations", str(violations), f"in {checks} checks", "bad" if violations else "good"),
    ]


def _island_rows(data: RunData, now: float) -> list[dict[str, Any]]:
    """Live heartbeats, and the final reports of islands that left. One that missed three heartbeats is silent."""
    groups: dict[str, int] = {}
    for record in data.steps:
        for name, count in record.islands.items():
            groups[name] = groups.get(name, 0) + count
    reports = {str(event.data.get("island_id")): event.data for event in data.events if event.kind == "island_report"}
    live = {record.island_id: record.model_dump() for record in data.islands}
    for island in data.islands:
        if island.state != "failed" and not is_live(island, now):
            live[island.island_id]["state"] = f"{island.state}, now silent"
    rows = []
    for name in data.island_ids():
        known = {"state": "left", **reports.get(name, {}), **live.get(name, {})}
        columns = ("state", "applied", "versions_applied", "versions_verified", "heartbeat_at", "last_error")
        rows.append({"island_id": name, "groups": groups.get(name, 0)} | {key: known.get(key) for key in columns})
    return rows


def _first_use(data: RunData) -> dict[int, int]:
    """The first optimizer step whose gradient each fire corrected."""
    first: dict[int, int] = {}
    for record in data.steps:
        if record.sign_fire is not None:
            first.setdefault(record.sign_fire, record.step)
    return first
