"""Flow: as many islands as a run needs. One flow run is one look; `python -m flows.fleet RUN` looks on a schedule and
when something happens, until the run has ended.

Nothing is kept between looks but what is on the board, so flow runs may be late, lost, doubled or killed.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click
from prefect import flow
from prefect.events import DeploymentEventTrigger
from prefect.runtime import deployment as this_deployment

from sprawl.event_names import ISLAND_LOST, RUN_UNHEALTHY, resource
from sprawl.fleet.settings import FleetSettings
from tasks.look_at_fleet import look_at_fleet, reap_fleet

if TYPE_CHECKING:
    from prefect.deployments.runner import RunnerDeployment

    from sprawl.board.store import Store
    from sprawl.run.fleet import Fleet

EVENTS = (ISLAND_LOST, RUN_UNHEALTHY)
DRAIN_S = 60.0


@flow(name="fleet", flow_run_name="fleet-{run_id}", persist_result=False)
def fleet(
    run_id: str = "latest",
    board: str | None = None,
    machines: str = "sky",
    settings: FleetSettings | None = None,
    job_group: str | None = None,
) -> dict[str, Any]:
    """Look at a run's islands once: start what is missing, drain what is too much, replace what is lost. When the run
    has ended, end all of them and switch this deployment's schedule off.

    Args:
        run_id: Run to look after ("latest" for the newest one on the board).
        board: Directory or object-store URL of the run. Default: $SPRAWL_BOARD, else ./runs.
        machines: Whose machines: local (processes of this one), sky (SkyPilot), or another fleet that is installed.
        settings: Bounds, cost, patience. Default: see FleetSettings.
        job_group: Managed job that islands are attached to: they end with it.
    """
    from sprawl.fleet.controller import Controller

    settings = settings or FleetSettings()
    store, name, adapter = _open(run_id, board, machines, settings, job_group)
    found = look_at_fleet(name, Controller(store, name, adapter, settings))
    ended = not found["open"]
    reaped = reap_fleet(name, store, adapter, DRAIN_S) if ended else 0
    if ended:
        _rest()
    return {"run_id": name, "target": found["target"], "ready": found["alive"], "ended": ended, "reaped": reaped}


def _open(
    run_id: str, board: str | None, machines: str, settings: FleetSettings, job_group: str | None
) -> tuple[Store, str, Fleet]:
    from sprawl.board.ledger import Ledger, resolve_run
    from sprawl.board.store import open_store
    from sprawl.config import parse_config
    from sprawl.run.fleet import FleetContext, open_fleet
    from sprawl.run.options import absolute_board

    place = absolute_board(board or os.environ.get("SPRAWL_BOARD", "runs"))
    store = open_store(place)
    name = resolve_run(store, run_id)
    context = FleetContext(
        place,
        name,
        parse_config(Ledger(store, name).run().config, f"run.json of {name}"),
        Path.cwd() / ".sprawl" / "logs" / name,
        island_hourly_cost=settings.island_hourly_cost,
        job_group=job_group,
        lasting=True,  # this flow run is over in a moment
    )
    return store, name, open_fleet(machines, context)


def _rest() -> None:
    """Switch the schedules of the deployment that this flow run belongs to off: its run has ended."""
    if not this_deployment.id:
        return
    from prefect.client.orchestration import get_client

    mine = UUID(str(this_deployment.id))
    with get_client(sync_client=True) as client:
        for schedule in client.read_deployment_schedules(mine):
            client.update_deployment_schedule(mine, schedule.id, active=False)


def deploy(
    run_id: str,
    board: str | None,
    machines: str,
    settings: FleetSettings,
    job_group: str | None = None,
    every: timedelta = timedelta(minutes=1),
) -> RunnerDeployment:
    """A deployment of one run's fleet: looks every minute, and at once when the run says that an island was lost or
    that it is unhealthy. Looks do not overlap."""
    return fleet.to_deployment(  # type: ignore[return-value]
        name=run_id,
        interval=every,
        triggers=[
            DeploymentEventTrigger(
                name=f"fleet-{run_id}",
                expect=set(EVENTS),
                match={"prefect.resource.id": resource(run_id)},
                within=timedelta(seconds=10),
            )
        ],
        parameters={
            "run_id": run_id,
            "board": board,
            "machines": machines,
            "settings": settings.model_dump(mode="json"),
            "job_group": job_group,
        },
        tags=["sprawl"],
        description=f"Islands of {run_id}: as many as it needs, none when it is over.",
    )


@click.command()
@click.argument("run_id")
@click.option("--board", envvar="SPRAWL_BOARD", default="runs", show_default=True, help="Board directory or URL.")
@click.option("--fleet", "machines", default="sky", show_default=True, help="Whose machines.")
@click.option("--job-group", default=None, help="Managed job that islands are attached to.")
@click.option(
    "--settings", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Fleet settings."
)
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="A fleet setting (repeatable).")
@click.option("--every", type=click.IntRange(min=10), default=60, show_default=True, help="Seconds between looks.")
def main(
    run_id: str,
    board: str,
    machines: str,
    job_group: str | None,
    file: Path | None,
    overrides: tuple[str, ...],
    every: int,
) -> None:
    """Look after the islands of RUN_ID as a Prefect deployment served by this process.

    Talks to the server of the Prefect settings. Ctrl-C stops looking; islands go on, and `sprawl fleet reap` ends them.
    """
    from prefect import serve

    from sprawl.board.fleet_log import FleetLog
    from sprawl.board.store import open_store
    from sprawl.fleet.settings import load_settings
    from sprawl.run.options import absolute_board

    place = absolute_board(board)
    settings = load_settings(file, overrides)
    FleetLog(open_store(place), run_id).open("flow fleet")
    serve(deploy(run_id, place, machines, settings, job_group, timedelta(seconds=every)), limit=1)


if __name__ == "__main__":
    main()
