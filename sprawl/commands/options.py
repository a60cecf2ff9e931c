"""Options that several commands take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]


class FiniteRange(click.FloatRange):
    """A range that infinity and nan, which is in every range, are no part of."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def board_option(command: Command) -> Command:
    """Option --board: parameter `board`, a directory or URL."""
    return click.option(
        "--board",
        envvar="SPRAWL_BOARD",
        default="runs",
        show_default="$SPRAWL_BOARD, else runs",
        help="Board the run lives on: a directory or an object-store URL.",
    )(command)


def run_on_board(command: Command) -> Command:
    """Argument RUN_ID and option --board: parameters `run_id` (may be "latest") and `board`."""
    return click.argument("run_id", default="latest")(board_option(command))


def json_option(command: Command) -> Command:
    """Option --json: parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(command)


def signing_key(command: Command) -> Command:
    """Option --key: parameter `key`, a path or None."""
    return click.option(
        "--key",
        envvar="SPRAWL_SIGNING_KEY",
        type=click.Path(dir_okay=False),
        help="Sign with this key (see keygen).  [default: $SPRAWL_SIGNING_KEY, else unsigned]",
    )(command)


def trusted_keys(command: Command) -> Command:
    """Option --trusted: parameter `trusted`, a path or None."""
    return click.option(
        "--trusted",
        envvar="SPRAWL_TRUSTED_KEYS",
        type=click.Path(dir_okay=False),
        help="Accept only what these public keys signed.  [default: $SPRAWL_TRUSTED_KEYS, else anything]",
    )(command)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
