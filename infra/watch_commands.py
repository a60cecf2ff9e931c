"""`sprawl automations` and `sprawl promote`: what the Prefect server does by itself, and what it asks people."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from infra.commands import HOME
from sprawl.commands.options import board_option
from sprawl.errors import SprawlError

if TYPE_CHECKING:
    from pathlib import Path

    from prefect.client.orchestration import SyncPrefectClient


@contextlib.contextmanager
def _client(home: Path) -> Iterator[SyncPrefectClient]:
    """A client of the local stack's server where that is up, else of the Prefect settings' one.

    Raises SprawlError when none answers.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_KEY, PREFECT_API_URL, temporary_settings

    from infra.stack import Stack, healthy

    status = Stack(home).status()
    mine = status.server == "up" and status.api_url is not None
    url = status.api_url if mine else PREFECT_API_URL.value()
    if not url or not healthy(url):
        raise SprawlError("no Prefect server answers", "start one with `sprawl up`")
    with (
        temporary_settings({PREFECT_API_URL: url}, restore_defaults={PREFECT_API_KEY} if mine else set()),
        get_client(sync_client=True) as client,
    ):
        yield client


@click.command()
@click.option(
    "--evaluate-every",
    type=click.IntRange(min=0),
    metavar="N",
    help="Evaluate every N-th version of every run by the deployment evaluate/local: 1, 5, 10, 20, 50, 100, "
    "200, 500 or 1000; 0: no longer.  [default: as it is]",
)
@click.option(
    "--notify",
    metavar="TYPE/NAME",
    help="Notification block that alerts are sent to, for example slack-webhook/team.  [default: as it is]",
)
@HOME  # fmt: skip
def automations(evaluate_every: int | None, notify: str | None, home: Path) -> None:
    """Install or change what the Prefect server does by itself when a run says something.

    `sprawl up` installs the alerts: the mismatch of a run drifts, a run needs attention (a violation, a collapsed
    reward, no island), islands are being lost, a run stands still. They show in the UI's event feed; with --notify they
    reach people. An alert that was switched off in the UI stays off.

    \b
    Examples:
      sprawl automations                            install what is missing, say what there is
      sprawl automations --notify slack-webhook/team
      sprawl automations --evaluate-every 20        off the run: a worker starts a sidecar for it
    """
    from infra.watch import install

    with _client(home) as client:
        for name, change in install(client, notify=notify, evaluate_every=evaluate_every).items():
            click.echo(f"{change:9}  {name}")


@click.command()
@click.argument("run_id", default="latest")
@click.option("--version", type=click.IntRange(min=0), help="Version to decide on.  [default: the newest]")
@board_option
@click.option("--list", "listed", is_flag=True, help="Only list what was decided.")
@HOME  # fmt: skip
def promote(run_id: str, version: int | None, board: str, listed: bool, home: Path) -> None:
    """Ask a person, in the Prefect UI, whether a version of RUN_ID is promoted.

    Starts the flow `promote` on the worker of the stack; it shows what is known about the version and waits, suspended,
    until somebody presses Resume and fills in the form. The answer is written on the board, once.

    \b
    Examples:
      sprawl promote                        the newest version of the newest run
      sprawl promote RUN --version 400
      sprawl promote RUN --list
    """
    from sprawl.board.ledger import Ledger, resolve_run
    from sprawl.board.reader import VersionReader
    from sprawl.board.store import open_store
    from sprawl.run.options import absolute_board

    store = open_store(board)
    name = resolve_run(store, run_id)
    ledger = Ledger(store, name)
    if listed:
        for record in ledger.promotions():
            verdict = "promoted" if record.approved else "rejected"
            click.echo(f"{record.version:6d}  {verdict}  by {record.by}  {record.reason}")
        return
    reader = VersionReader(store, name)
    wanted = reader.require(reader.require_head() if version is None else version).version
    known = ledger.promotion(wanted)
    if known is not None:
        raise SprawlError(f"version {wanted} of {name} was decided on by {known.by}", "`--list` shows how")
    from prefect.exceptions import ObjectNotFound
    from prefect.utilities.urls import url_for

    parameters = {"run_id": name, "version": wanted, "board": absolute_board(board)}
    with _client(home) as client:
        try:
            deployment = client.read_deployment_by_name("promote/local")
        except ObjectNotFound:
            raise SprawlError("the server has no deployment promote/local", "`sprawl up` registers it") from None
        started = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        click.echo(f"asking about version {wanted} of {name}: {url_for('flow-run', obj_id=started.id)}")
