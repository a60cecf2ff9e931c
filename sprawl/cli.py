"""`sprawl ...`: the command line. Commands load lazily, so that `--help` is quick and nothing imports torch for it.

User errors end with one line and exit code 2. Commands that need Prefect or machines (`up`, `down`, `status`)
register themselves under the entry-point group `sprawl.commands`.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points

import click

from sprawl import __version__
from sprawl.errors import SprawlError

COMMANDS = {
    "run": "sprawl.commands.run:run",
    "resume": "sprawl.commands.run:resume",
    "report": "sprawl.commands.report:report",
    "board": "sprawl.commands.board:board",
    "delta": "sprawl.commands.delta:delta",
    "sidecar": "sprawl.commands.serve:sidecar",
    "island": "sprawl.commands.serve:island",
    "mirror": "sprawl.commands.mirror:mirror",
    "fleet": "sprawl.commands.fleet:fleet",
    "plan": "sprawl.commands.plan:plan",
    "anchor": "sprawl.commands.anchor:anchor",
}


class LazyGroup(click.Group):
    """Resolves a command when it is asked for: built-in ones first, then what installed packages registered."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        registered = {entry.name for entry in entry_points(group="sprawl.commands")}
        return [*COMMANDS, *sorted(registered - set(COMMANDS))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            module, _, attribute = COMMANDS[cmd_name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        for entry in entry_points(group="sprawl.commands"):
            if entry.name == cmd_name:
                return entry.load()
        return None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="sprawl")
def cli() -> None:
    """RL post-training on compute that is not one cluster.

    \b
    A first run on this machine:
      sprawl run configs/tiny.yaml --up      start the local stack and train (8 minutes on 2 cores)
      sprawl report latest                   one HTML page with everything the run measured
      sprawl board verify runs               rebuild every published version and check it bit for bit
      sprawl down                            stop the local stack

    A run lives on a board: a directory or an object-store URL. Every command that needs one takes --board
    (default: $SPRAWL_BOARD, else ./runs).
    """


def main() -> None:
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.UsageError as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
            error.show()
        else:
            message = error.format_message().rstrip(".")
            click.echo(f"sprawl: {message} (see {_command_of(error.ctx)} --help)", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except SprawlError as error:
        click.echo(f"sprawl: {error}", err=True)
        sys.exit(2)


def _command_of(context: click.Context | None) -> str:
    """`sprawl board gc`, however the program was started."""
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name or "")
        context = context.parent
    return " ".join(["sprawl", *names])


if __name__ == "__main__":
    main()
