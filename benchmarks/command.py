"""How a benchmark is run from a shell, and how it runs other commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import click

from sprawl.errors import SprawlError


def run(command: click.Command) -> None:
    """Run a benchmark's command: 130 when interrupted, 2 and one line for what the user can mend."""
    try:
        command.main(standalone_mode=False)
    except (KeyboardInterrupt, click.exceptions.Abort):
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except SprawlError as error:
        click.echo(f"{command.name}: {error}", err=True)
        sys.exit(2)


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
