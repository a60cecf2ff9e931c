"""How a benchmark is run from a shell."""

from __future__ import annotations

import sys

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
