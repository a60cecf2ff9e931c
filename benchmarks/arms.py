"""Three arms of one run, one after another: as configured, without the anchor, and dense.

    python -m benchmarks.arms                     three runs of configs/tiny.yaml, 100 steps each
    python -m benchmarks.arms --quick             12 small steps each: does everything still work?
    python -m benchmarks.arms --tag mine          arms already finished under this tag are reused, stopped ones resumed

What it shows: reward rises under a boundary that carries a few percent of its bytes when the anchor's sign corrects
the gradient, and does not without it; dense is the ceiling. Every number comes from the runs' ledgers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.command import run
from sprawl.board.ledger import list_runs
from sprawl.board.store import Store, open_store
from sprawl.config import load_config
from sprawl.errors import SprawlError
from sprawl.report.compare import comparison_markdown, comparison_rows, write_comparison
from sprawl.report.data import RunData, load_run


@dataclass(frozen=True)
class Arm:
    name: str
    overrides: tuple[str, ...]


ARMS = (
    Arm("prf-anchor", ()),
    Arm("prf", ("anchor.enabled=false",)),
    Arm("dense", ("boundary.codec=dense", "anchor.enabled=false")),
)
# Small, but with three fires, two keyframes and an evaluation in 12 steps.
QUICK = (
    "rollout.islands=1",
    "rollout.prompts=4",
    "rollout.samples=8",
    "checkpoint.every=2",
    "anchor.every=4",
    "anchor.lag=4",
    "publish.keyframe_every=6",
    "probe.every=3",
    "evaluate.every=12",
    "evaluate.problems=40",
)
QUICK_STEPS = 12


def overrides_of(arm: Arm, steps: int, quick: bool) -> list[str]:
    """The `--set` values of an arm."""
    return [f"steps={steps}", *(QUICK if quick else ()), *arm.overrides]


def arm_command(config: Path, board: str, run_id: str, overrides: Sequence[str], known: RunData | None) -> list[str]:
    """How to start an arm, or to continue one that was stopped (its config is on the board)."""
    command = [sys.executable, "-m", "sprawl.cli", "run", str(config), "--runner", "plain", "--board", board]
    if known is not None:
        return [*command, "--resume", run_id]
    return [*command, "--run-id", run_id, *(part for item in overrides for part in ("--set", item))]


def find_run(store: Store, run_id: str) -> RunData | None:
    """The run's ledger, None when there is no such run yet."""
    return load_run(store, run_id) if any(run.run_id == run_id for run in list_runs(store)) else None


def stream(command: Sequence[str], prefix: str) -> int:
    """Run a command with its output passed on line by line to stderr; returns its exit code.

    Ctrl-C reaches the child as well (same process group): it is given the time to stop its own processes.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "150"}  # a line a step, unwrapped
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                click.echo(f"{prefix} | {line.rstrip()}", err=True)
        except KeyboardInterrupt:
            for line in process.stdout:
                click.echo(f"{prefix} | {line.rstrip()}", err=True)
            process.wait()
            raise
        return process.wait()


def run_arm(arm: Arm, config: Path, board: str, run_id: str, overrides: Sequence[str]) -> RunData:
    """The finished ledger of an arm, from a new run, a resumed one or one that had finished before.

    Raises SprawlError when the run does not finish, or when the tag belongs to a run of another length.
    """
    wanted = load_config(config, list(overrides))
    known = _existing(board, run_id)
    if known is not None and known.setting("steps") != wanted.steps:
        raise SprawlError(
            f"{run_id} exists with {known.setting('steps')} steps, not {wanted.steps}", "choose another --tag"
        )
    if known is not None and known.finished:
        click.echo(f"{arm.name} | {run_id} had finished: reused", err=True)
        return known
    code = stream(arm_command(config, board, run_id, overrides, known), arm.name)
    # Exit code 1 is a run that finished with violations: they belong in the table.
    data = _existing(board, run_id) if code in (0, 1) else None
    if data is None or not data.finished:
        tag = run_id.removeprefix(f"arms-{arm.name}-")
        raise SprawlError(f"arm {arm.name} ended with code {code} before it finished", f"continue with --tag {tag}")
    return data


def _existing(board: str, run_id: str) -> RunData | None:
    if "://" not in board and not os.path.isdir(board):
        return None  # the first run creates the directory
    return find_run(open_store(board), run_id)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(path_type=Path), default=Path("configs/tiny.yaml"), show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="Steps of each arm.  [default: 100, 12 with --quick]")
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/figures/arms"), show_default=True)
@click.option("--board", envvar="SPRAWL_BOARD", default="runs", show_default="$SPRAWL_BOARD, else runs")
@click.option("--tag", help="Names the runs arms-<arm>-<tag>; a known tag continues them.  [default: the time]")
@click.option("--json", "as_json", is_flag=True, help="Print the table as one JSON list and nothing else on stdout.")
@click.option("--quick", is_flag=True, help="Smaller batches, fires every 4 steps: a check, not a measurement.")
def arms(config: Path, steps: int | None, out: Path, board: str, tag: str | None, as_json: bool, quick: bool) -> None:
    """Train three arms (as configured, without anchor, dense) and compare them.

    Writes comparison.png, comparison.md and comparison.json under --out. Progress goes to stderr.
    """
    steps = steps or (QUICK_STEPS if quick else 100)
    tag = tag or time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    for arm in ARMS:  # every config error before the first minute of training
        load_config(config, overrides_of(arm, steps, quick))
    runs = [run_arm(arm, config, board, f"arms-{arm.name}-{tag}", overrides_of(arm, steps, quick)) for arm in ARMS]
    paths = write_comparison(runs, out)
    rows = comparison_rows(runs)
    click.echo(json.dumps(rows, allow_nan=False) if as_json else comparison_markdown(rows))
    click.echo(f"{paths.png}", err=True)
    for row in rows:
        for violation in row["violations"]:
            click.echo(f"violation in {row['label']}: {violation}", err=True)
    if any(row["violations"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    run(arms)
