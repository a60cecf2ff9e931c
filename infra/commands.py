"""`sprawl up`, `sprawl down`, `sprawl status`: the local stack on the command line."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from infra.stack import Stack

KEEP_S = 15.0  # between two looks of `up --keep`

HOME = click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".sprawl"),
    show_default=True,
    help="Directory of the stack: database, logs, process ids.",
)


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), help="Port of server and UI.  [default: 4200, or the next free]")
@click.option("--wait", "wait_s", type=float, default=120.0, show_default=True, help="Seconds the server may take.")
@click.option("--board-server", is_flag=True, help="Start an object store for boards too (SeaweedFS).")
@click.option("--keep", is_flag=True, help="Stay, and start again what dies, until interrupted. For systemd and cron.")
@HOME
def up(port: int | None, wait_s: float, board_server: bool, keep: bool, home: Path) -> None:
    """Start the local stack: Prefect server with UI, work pool, deployments, worker.

    Takes 15 to 25 seconds the first time; what is up is left alone, what died is started again, flow runs included.
    Nothing leaves this machine: the server listens on 127.0.0.1 and keeps its database under --home.

    \b
    Then:
      sprawl run configs/tiny.yaml       train; the run appears in the UI
      prefect deployment run post-train/local --param config=configs/tiny.yaml --watch
                                         the same through the worker
      sprawl down                        stop everything this command started
    """
    from infra.stack import Stack

    began = time.monotonic()
    stack = Stack(home)
    info = stack.up(port, wait_s, board=board_server)
    for note in info.notes:
        click.echo(note)
    if info.started:
        click.echo(f"stack up in {time.monotonic() - began:.0f} s; logs in {home / 'logs'}")
    else:
        click.echo(f"stack already up (server pid {info.pid})")
    click.echo(f"UI   {info.ui_url}")
    click.echo(f"API  {info.api_url}")
    if info.board is not None:
        click.echo(f"board {info.board[0]}; to use it: source {info.board[1]}")
    if not _found_by_prefect(info.api_url):
        click.echo(f"for the prefect command: export PREFECT_API_URL={info.api_url}")
    if keep:
        _keep(stack, wait_s)


def _keep(stack: Stack, wait_s: float) -> None:
    """Until Ctrl-C or SIGTERM, which leave the stack up."""
    from sprawl.errors import SprawlError

    said: set[str] = set()
    while True:
        time.sleep(KEEP_S)
        try:
            info = stack.up(wait_s=wait_s)
            news = [*info.notes, *(["the server had died: started again"] if info.started else [])]
        except SprawlError as error:
            news = [str(error)]
        for line in news:
            if line not in said:
                click.echo(f"{time.strftime('%H:%M:%S')} {line}")
        said = set(news)


def _found_by_prefect(api_url: str) -> bool:
    """Whether the `prefect` command, started here, would talk to this server."""
    from prefect.settings import PREFECT_API_URL

    return PREFECT_API_URL.value() == api_url


@click.command()
@HOME
def down(home: Path) -> None:
    """Stop the local stack, and flow runs its worker started.

    Ends exactly the processes `sprawl up` started (checked by pid and start time). Runs keep everything they committed
    to their board; `sprawl run CONFIG --resume RUN_ID` goes on from there. The database stays for the next `up`.
    """
    from infra.stack import Stack

    click.echo("stack down" if Stack(home).down() else "nothing was up")


@click.command()
@HOME
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(home: Path, as_json: bool) -> None:
    """Say whether the local stack is up. Exit code 0 when it is, 1 when it is not."""
    from infra.stack import Stack

    current = Stack(home).status()
    if as_json:
        click.echo(json.dumps(asdict(current)))
    else:
        click.echo(f"server  {current.server}" + (f"  {current.ui_url}  (pid {current.pid})" if current.pid else ""))
        click.echo(f"worker  {current.worker}")
        if current.board is not None:
            click.echo(f"board   {current.board}")
    if (current.server, current.worker) != ("up", "up") or current.board == "down":
        sys.exit(1)
