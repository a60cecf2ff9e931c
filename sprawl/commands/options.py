"""What the `sprawl board` commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]


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
