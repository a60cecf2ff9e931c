"""`sprawl run` and `sprawl resume`: start or continue a run."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from sprawl.run.options import RunOptions

RUNNERS = click.Choice(["auto", "prefect", "plain"])


def _options(function):
    """Options that `run` and `resume` share."""
    for option in (
        click.option(
            "--board", envvar="SPRAWL_BOARD", help="Board URL or directory [default: the config's, else runs]."
        ),
        click.option("--runner", type=RUNNERS, default="auto", show_default=True, help=RUNNER_HELP),
        click.option("--fleet", default="local", show_default=True, help=FLEET_HELP),
        click.option("--up", is_flag=True, help="Start the local Prefect stack first if it is not running."),
        click.option("--no-page", is_flag=True, help="Draw no HTML report at the end (with --runner plain)."),
        click.option("--metrics", metavar="HOST:PORT", help=METRICS_HELP),
    ):
        function = option(function)
    return function


METRICS_HELP = (
    "Answer Prometheus here while the run trains: /metrics, and /targets to find its islands.  [default: "
    "SPRAWL_METRICS, if that is free]"
)
FLEET_HELP = (
    "Who starts islands and anchor. local: this process; none: somebody else (sky/*.yaml, `sprawl fleet run`), and the "
    "run waits for them; sky: SkyPilot jobs."
)
RUNNER_HELP = "prefect: watched in the Prefect UI; plain: this process alone; auto: prefect if a stack is up."


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Override a config field (repeatable).")
@click.option("--resume", metavar="RUN_ID", help="Continue this run ('latest' for the newest) where it was killed.")
@click.option("--run-id", help="Name of the new run [default: <config name>-<time>].")
@_options
def run(
    config: Path,
    overrides: tuple[str, ...],
    resume: str | None,
    run_id: str | None,
    board: str | None,
    runner: str,
    fleet: str,
    up: bool,
    no_page: bool,
    metrics: str | None,
) -> None:
    """Train as CONFIG says, from the first step to the report.

    Starts rollout islands and the anchor as processes of their own, prints a line a step, evaluates, and leaves
    everything on the board. Ctrl-C stops all of it; the run continues later with --resume.

    \b
    Examples:
      sprawl run configs/tiny.yaml --up
      sprawl run configs/tiny.yaml --set steps=40 --set boundary.codec=dense --set anchor.enabled=false
      sprawl run configs/tiny.yaml --resume tiny-20260801-101500
    """
    from sprawl.config import load_config
    from sprawl.run.options import RunOptions, absolute_board

    if resume is not None and (overrides or run_id):
        raise click.UsageError("--resume continues a run with its own config: --set and --run-id cannot change it")
    loaded = load_config(config, list(overrides))
    options = RunOptions(
        config=None if resume is not None else loaded,
        config_source=str(config),
        board=absolute_board(board or loaded.board),
        run_id=run_id,
        resume=resume,
        page=not no_page,
        metrics=metrics,
        fleet=fleet,
    )
    sys.exit(_drive(options, runner, up))


@click.command()
@click.argument("run_id", default="latest")
@_options
def resume(
    run_id: str, board: str | None, runner: str, fleet: str, up: bool, no_page: bool, metrics: str | None
) -> None:
    """Continue a run where it was stopped or killed: RUN_ID, or the newest one.

    Committed steps are never trained again: the newest checkpoint is loaded and the steps after it are replayed from
    the stored rollouts, up to the last published version.

    \b
    Examples:
      sprawl resume
      sprawl resume tiny-20260801-101500 --board s3://bucket/prefix
    """
    from sprawl.run.options import RunOptions, absolute_board

    place = absolute_board(board or "runs")
    options = RunOptions(
        config=None,
        config_source="CONFIG",
        board=place,
        resume=run_id,
        page=not no_page,
        metrics=metrics,
        fleet=fleet,
    )
    sys.exit(_drive(options, runner, up))


def _show_notices() -> None:
    """What a run has to say besides its steps (fetching a model, a lost island) goes to the terminal as it is."""
    logger = logging.getLogger("sprawl.run")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _drive(options: RunOptions, runner: str, up: bool) -> int:
    """Hand the run to the runner: `plain` is ours, others are registered under `sprawl.runners`."""
    from importlib.metadata import entry_points

    from sprawl.errors import SprawlError
    from sprawl.run.launch import launched_rank

    _show_notices()
    if launched_rank():
        # Started by torchrun: the first process drives the run, the others serve its trainer.
        from sprawl.run.stage_server import serve

        return serve()
    if not options.page and runner != "plain":
        raise click.UsageError("--no-page goes with --runner plain")
    if runner == "auto":
        runner = "prefect" if up or _stack_is_up() else "plain"
    if runner == "plain":
        if up:
            raise click.UsageError("--up starts the Prefect stack, which --runner plain does not use")
        from sprawl.run.loop import run_plain
        from sprawl.run.terminal import Progress

        return run_plain(options, Progress())
    for entry in entry_points(group="sprawl.runners"):
        if entry.name == runner:
            return entry.load()(options, up=up)
    raise SprawlError(f"the {runner} runner is not installed", "use --runner plain, or install Sprawl's flows")


def _stack_is_up() -> bool:
    """Whether a stack is running, as told by whoever registered a probe; without one, no."""
    from importlib.metadata import entry_points

    return any(entry.load()() for entry in entry_points(group="sprawl.stacks"))
