"""`sprawl compare`: matched arms of one run, trained and laid beside each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sprawl.commands.options import board_option, json_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sprawl.report.data import RunData
    from sprawl.study.plan import Cell

INTERRUPTED = 130


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("study_file", metavar="STUDY", type=click.Path(path_type=Path))
@board_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where tables and figures go.  [default: reports/compare/<study>]",
)
@click.option("--only", multiple=True, metavar="ARM", help="Only this arm, or pattern of arms. Repeatable.")
@click.option("--seed", "seeds", type=int, multiple=True, help="Only this one of the study's seeds. Repeatable.")
@click.option("--parallel", type=click.IntRange(min=1), help="Runs at a time.  [default: the study's]")
@click.option("--list", "as_list", is_flag=True, help="Print every run and how far it is, and do nothing.")
@click.option("--no-run", is_flag=True, help="Train nothing: tables and figures of what is on the board.")
@json_option
@click.option("--quick", is_flag=True, help="12 small steps an arm, one seed: a check, not a measurement.")
def compare(
    study_file: Path,
    board: str,
    out: Path | None,
    only: tuple[str, ...],
    seeds: tuple[int, ...],
    parallel: int | None,
    as_list: bool,
    no_run: bool,
    as_json: bool,
    quick: bool,
) -> None:
    """Train every arm of STUDY with every seed and lay them side by side.

    An arm with a seed is one run of the system, <study>-<arm>-s<seed>. Finished runs are reused and stopped ones
    resumed, so the same command goes on where it was interrupted. Progress goes to stderr, the log of each run to
    .sprawl/logs/<run>/run.log. A study with `timing` ends with a short run of every arm, one at a time, from which its
    seconds are taken: leave the machine alone then.

    \b
    Examples:
      sprawl compare configs/compare/report.yaml --list
      sprawl compare configs/compare/report.yaml --parallel 2
      sprawl compare configs/compare/report.yaml --only dense --only 'prf*' --seed 7
      sprawl compare configs/compare/report.yaml --no-run        tables and figures so far

    Exit code 1 when a run failed twice or finished with violations.
    """
    from sprawl.run.stopping import terminate_as_interrupt
    from sprawl.study.job import open_job, write_job_results
    from sprawl.study.runner import failures, prepare, train_cells

    job = open_job(study_file, board, quick=quick, only=only, seeds=seeds)
    if as_list:
        for line in listing([*job.cells, *job.timing], job.known):
            click.echo(line)
        return
    failed: list[str] = []
    if not no_run:
        try:
            with terminate_as_interrupt():
                prepare(job.cells, _note)
                outcomes = train_cells(job.cells, job.board, job.study, parallel or job.study.parallel, _note)
                outcomes += train_cells(job.timing, job.board, job.study, 1, _note)
        except KeyboardInterrupt:
            _note("interrupted; the same command goes on with it")
            sys.exit(INTERRUPTED)
        failed = failures(outcomes)
        for line in failed:
            _note(f"failed: {line}")
    results, paths = write_job_results(job, out)
    for path in paths:
        _note(str(path))
    click.echo(json.dumps(results.data, allow_nan=False) if as_json else "\n".join(results.tables.values()), nl=as_json)
    for line in results.violations:
        _note(f"violation in {line}")
    if failed or results.violations:
        sys.exit(1)


def listing(cells: Sequence[Cell], known: Mapping[str, RunData]) -> list[str]:
    """`run id   state` for every cell."""
    from sprawl.study.measures import gave_up

    width = max(len(cell.run_id) for cell in cells)
    lines = []
    for cell in cells:
        data = known.get(cell.run_id)
        if data is None:
            state = f"not started, {cell.config.steps} steps"
        elif data.finished:
            state = f"finished, {data.last_step} steps"
        elif gave_up(data):
            state = f"stopped by itself after {data.last_step} of {cell.config.steps} steps"
        else:
            state = f"stopped or running, {data.last_step} of {cell.config.steps} steps"
        lines.append(f"{cell.run_id:<{width}}  {state}")
    return lines


def _note(text: str) -> None:
    click.echo(text, err=True)
