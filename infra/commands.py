"""`sprawl up`, `sprawl down`, `sprawl status`: the local stack on the command line."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

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
@HOME
def up(port: int | None, wait_s: float, home: Path) -> None:
    """Start the local stack: Prefect server with UI, work pool, deployments, worker.

    Takes 15 to 25 seconds the first time; a stack that is up is left alone. Nothing leaves this machine: the server
    listens on 127.0.0.1 and keeps its database under --home.

    \b
    Then:
      sprawl run configs/tiny.yaml                              train; the run appears in the UI
      prefect deployment run post-train/local -p steps=20       the same through the worker
      sprawl down                                               stop everything this command started
    """
    from infra.stack import Stack

    began = time.monotonic()
    info = Stack(home).up(port, wait_s)
    for note in info.notes:
        click.echo(note)
    if info.started:
        click.echo(f"stack up in {time.monotonic() - began:.0f} s; logs in {home / 'logs'}")
    else:
        click.echo(f"stack already up (server pid {info.pid})")
    click.echo(f"UI   {info.ui_url}")
    click.echo(f"API  {info.api_url}")


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
    if (current.server, current.worker) != ("up", "up"):
        sys.exit(1)
