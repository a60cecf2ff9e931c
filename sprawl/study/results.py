"""What a study leaves behind: tables, figures and every number of them, from the ledgers on the board."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sprawl.errors import SprawlError, file_failure
from sprawl.report.data import RunData
from sprawl.report.style import figure_bytes
from sprawl.study.config import StudyConfig
from sprawl.study.figures import group_figure
from sprawl.study.measures import COLLAPSE_RULE, ArmRuns, arm_measures, arm_runs
from sprawl.study.plan import Cell, steps_of, study_id
from sprawl.study.staleness import milestones, staleness_measures
from sprawl.study.table import arms_table, staleness_table, violations


@dataclass(frozen=True)
class Results:
    """Markdown tables by kind, figures by group as PNG bytes, and everything as JSON values."""

    tables: dict[str, str]
    figures: dict[str, bytes]
    data: dict[str, Any]

    @property
    def violations(self) -> list[str]:
        """Each once, with its run id."""
        return list(dict.fromkeys(violation for row in self.data["arms"] for violation in row["violations"]))


def make_results(study: StudyConfig, cells: Sequence[Cell], known: Mapping[str, RunData], *, quick: bool) -> Results:
    """Everything from the runs that are there. Pure. Raises SprawlError when none of them has an optimizer step."""
    rows = table_rows(study, cells, known, quick=quick)
    if not any(runs.runs for runs in rows):
        raise SprawlError(f"no run of study {study.name} has an optimizer step yet", "train some: leave out --no-run")
    rows = [runs for runs in rows if runs.runs]
    at = milestones(study.milestones, rows)
    tables: dict[str, str] = {
        kind: arms_table(rows) if kind == "arms" else staleness_table(_once_an_arm(rows), at) for kind in study.tables
    }
    figures = {}
    for group in study.groups:
        steps = study.quick.steps if quick else group.steps or study.steps
        arms = [arm_runs(study, arm, cells, known, steps) for arm in study.arms_of(group)]
        if any(runs.runs for runs in arms):
            figures[group.name] = figure_bytes(group_figure(group, arms))
    data: dict[str, Any] = {
        "study": study_id(study, quick),
        "title": study.title,
        "base": study.base,
        "seeds": sorted({cell.seed for cell in cells}),
        "rule": COLLAPSE_RULE,
        "arms": [_row(runs) for runs in rows],
    }
    if "staleness" in study.tables:
        of = {runs.arm.name: staleness_measures(runs, at) for runs in _once_an_arm(rows)}
        data["milestones"] = asdict(at)
        data["staleness"] = {
            name: {key: spread.as_dict() for key, spread in measures.items()} for name, measures in of.items()
        }
    return Results(tables, figures, data)


def table_rows(
    study: StudyConfig, cells: Sequence[Cell], known: Mapping[str, RunData], *, quick: bool
) -> list[ArmRuns]:
    """The rows of the table: every arm over the study's steps, and those with more over all of theirs as well."""
    chosen = {cell.arm.name for cell in cells}
    rows = []
    for arm in study.all_arms():
        if arm.name not in chosen:
            continue
        steps = steps_of(study, arm, quick)
        rows.append(arm_runs(study, arm, cells, known, min(steps, study.quick.steps if quick else study.steps)))
        if steps > study.steps and not quick:
            rows.append(arm_runs(study, arm, cells, known, steps))
    return rows


def write_results(results: Results, out: Path) -> list[Path]:
    """`<kind>.md`, `<group>.png` and `results.json` under `out` (created; files are replaced)."""
    files = {f"{kind}.md": text.encode() for kind, text in results.tables.items()}
    files |= {f"{name}.png": png for name, png in results.figures.items()}
    files["results.json"] = (json.dumps(results.data, indent=2, allow_nan=False) + "\n").encode()
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (out / name).write_bytes(data)
    except OSError as error:
        raise file_failure("write the results under", out, error) from None
    return [out / name for name in files]


def _once_an_arm(rows: Sequence[ArmRuns]) -> list[ArmRuns]:
    """The longest look at every arm."""
    return list({runs.arm.name: runs for runs in rows}.values())


def _row(runs: ArmRuns) -> dict[str, Any]:
    return {
        "arm": runs.arm.name,
        "label": runs.label,
        "steps": runs.steps,
        "seeds": list(runs.seeds),
        "complete": [data.run.run_id for data in runs.complete],
        "measures": {name: spread.as_dict() for name, spread in arm_measures(runs).items()},
        "verdicts": {str(seed): asdict(verdict) for seed, verdict in runs.verdicts().items()},
        "violations": violations(runs),
    }
