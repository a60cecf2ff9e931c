"""`sprawl fleet`: as many islands as a run needs, on rented machines, and none when it is over."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sprawl.commands.options import Command, FiniteRange, json_option, run_on_board

if TYPE_CHECKING:
    from sprawl.board.store import Store
    from sprawl.fleet.controller import Controller, Look
    from sprawl.fleet.settings import FleetSettings
    from sprawl.run.fleet import Fleet


def _machines(command: Command) -> Command:
    """The run, and whose machines: parameters `run_id`, `board`, `kind`, `job_group`."""
    command = click.option(
        "--job-group", default=None, help="Managed job that islands are attached to: they end with it."
    )(command)
    command = click.option(
        "--fleet",
        "kind",
        default="sky",
        show_default=True,
        help="Whose machines: sky (SkyPilot), or another one that is installed.",
    )(command)
    return run_on_board(command)


def _scaling(command: Command) -> Command:
    """`_machines`, and how they are scaled: parameters `settings_file`, `overrides`."""
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="NAME=VALUE",
        help="A fleet setting, for example max_islands=16 (repeatable).",
    )(command)
    command = click.option(
        "--settings",
        "settings_file",
        type=click.Path(path_type=Path),
        default=None,
        help="YAML with fleet settings.",
    )(command)
    return _machines(command)


@click.group()
def fleet() -> None:
    """Scale the islands of a run, and end them.

    What was decided is on the run's board, machines are found by their names: any process may look next, and several
    cannot get in each other's way. Islands that are up obey the board too, so a fleet that is closed ends even where
    nobody can reach it.

    \b
    Let a run have what it needs, at 40 dollars an hour at most, until it ends:
      sprawl fleet run RUN --board s3://bucket/runs --set max_islands=16 \\
        --set island_hourly_cost=2.5 --set max_hourly_cost=40
    One look, for a scheduler of your own:
      sprawl fleet look RUN --board s3://bucket/runs
    After anything went wrong; leaves nothing that costs money:
      sprawl fleet reap RUN --board s3://bucket/runs
    """


@fleet.command("run")
@click.option("--every", "every_s", type=FiniteRange(min=1), default=30.0, show_default=True,
              help="Seconds between two looks.")  # fmt: skip
@_scaling
def run_command(
    run_id: str,
    board: str,
    kind: str,
    job_group: str | None,
    settings_file: Path | None,
    overrides: tuple[str, ...],
    every_s: float,
) -> None:
    """Look again and again until the run has ended, then end its islands.

    Ctrl-C ends this command and nothing else: islands go on, and the next `sprawl fleet run` takes them over.
    """
    from sprawl.board.fleet_log import FleetLog
    from sprawl.errors import SprawlError
    from sprawl.fleet.reap import reap

    store, name, adapter, controller = _controller(run_id, board, kind, job_group, settings_file, overrides)
    FleetLog(store, name).open("sprawl fleet run")
    said = ""
    try:
        while True:
            try:
                look = controller.look()
            except SprawlError as error:
                click.echo(f"no look: {error}", err=True)
                time.sleep(every_s)
                continue
            if (line := describe(look)) != said:
                click.echo(f"{time.strftime('%H:%M:%S')} {line}")
                said = line
            if not look.open:
                break
            time.sleep(every_s)
    except KeyboardInterrupt:
        click.echo("islands go on; `sprawl fleet reap` ends them")
        sys.exit(130)
    ended = reap(store, name, adapter, drain_s=60.0, reason="the run has ended")
    click.echo(f"the run has ended; {len(ended.seen)} islands were still there and are gone")


@fleet.command()
@json_option
@_scaling
def look(
    run_id: str,
    board: str,
    kind: str,
    job_group: str | None,
    settings_file: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Look once: measure, decide, start, drain, replace. Exit code 0; 3 when the run has ended and nothing is left."""
    _, _, _, controller = _controller(run_id, board, kind, job_group, settings_file, overrides)
    found = controller.look()
    click.echo(json.dumps(asdict(found)) if as_json else describe(found))
    sys.exit(0 if found.open else 3)


@fleet.command()
@click.option("--drain", "drain_s", type=FiniteRange(min=0), default=0.0, show_default=True,
              help="Seconds that islands in service get to finish by themselves.")  # fmt: skip
@_machines
def reap(run_id: str, board: str, kind: str, job_group: str | None, drain_s: float) -> None:
    """End every island of a run and return when none is left.

    Closes the fleet on the board first, so that no controller and no late machine brings it back; `sprawl fleet run`
    opens it again. Needs no controller to be alive and may be repeated.
    """
    from sprawl.fleet.reap import reap as end_all

    store, name, adapter = _open(run_id, board, kind, job_group, None)
    ended = end_all(store, name, adapter, drain_s=drain_s)
    click.echo(f"{name}: {len(ended.seen)} islands were there, {len(ended.cancelled)} cancelled; nothing is left")


@fleet.command()
@json_option
@_machines
def status(run_id: str, board: str, kind: str, job_group: str | None, as_json: bool) -> None:
    """What was decided, which machines there are, and which islands are alive. Changes nothing."""
    from sprawl.board.fleet_log import FleetLog
    from sprawl.board.ledger import Ledger, is_live

    store, name, adapter = _open(run_id, board, kind, job_group, None)
    decided = FleetLog(store, name).head()
    machines = {machine.island_id: machine for machine in adapter.machines()}
    islands = {island.island_id: island for island in Ledger(store, name).islands()}
    names = sorted({*machines, *islands, *(decided.islands if decided else {})})
    rows = [
        {
            "island": each,
            "order": order.do if decided and (order := decided.islands.get(each)) else None,
            "machine": machines[each].phase if each in machines else None,
            "where": machines[each].where if each in machines else None,
            "state": islands[each].state if each in islands and is_live(islands[each]) else None,
            "version": islands[each].applied if each in islands else None,
            "url": islands[each].url if each in islands else None,
        }
        for each in names
    ]
    if as_json:
        click.echo(json.dumps({"run_id": name, "decided": decided and decided.model_dump(), "islands": rows}))
        return
    state = f"{decided.state}, {decided.target} wanted ({decided.reason})" if decided else "never looked at"
    click.echo(f"{name}: {state}")
    for row in rows:
        click.echo("  " + "  ".join(f"{key} {value}" for key, value in row.items() if value is not None))


def describe(look: Look) -> str:
    """One line."""
    parts = [f"{look.target} islands wanted: {look.reason}", f"{len(look.machines)} machines, {look.alive} ready"]
    for what, names in (("started", look.started), ("drained", look.drained), ("cancelled", look.cancelled)):
        if names:
            parts.append(f"{what} {', '.join(names)}")
    return "; ".join(parts)


def _controller(
    run_id: str,
    board: str,
    kind: str,
    job_group: str | None,
    settings_file: Path | None,
    overrides: tuple[str, ...],
) -> tuple[Store, str, Fleet, Controller]:
    from sprawl.fleet.controller import Controller
    from sprawl.fleet.settings import load_settings

    settings = load_settings(settings_file, overrides)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    store, name, adapter = _open(run_id, board, kind, job_group, settings)
    return store, name, adapter, Controller(store, name, adapter, settings)


def _open(
    run_id: str, board: str, kind: str, job_group: str | None, settings: FleetSettings | None
) -> tuple[Store, str, Fleet]:
    from sprawl.board.ledger import Ledger, resolve_run
    from sprawl.board.store import open_store
    from sprawl.config import parse_config
    from sprawl.run.fleet import FleetContext, open_fleet
    from sprawl.run.options import absolute_board

    place = absolute_board(board)
    store = open_store(place)
    name = resolve_run(store, run_id)
    config = parse_config(Ledger(store, name).run().config, f"run.json of {name}")
    context = FleetContext(
        place,
        name,
        config,
        Path.cwd() / ".sprawl" / "logs" / name,
        island_hourly_cost=settings.island_hourly_cost if settings else None,
        job_group=job_group,
    )
    return store, name, open_fleet(kind, context)
