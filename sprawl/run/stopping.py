"""Stopping a run in order, and how to go on with it. Shared by every runner."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sprawl.run.options import RunOptions, absolute_board

if TYPE_CHECKING:
    from sprawl.run.session import RunSession


def how_to_resume(options: RunOptions, session: RunSession) -> str:
    """The commands that go on with a run."""
    source, run_id = options.config_source, session.run_id
    board = "" if options.board == absolute_board(session.config.board) else f" --board {options.board}"
    if not Path(source).is_file():
        return f"to continue: sprawl resume {run_id}{board}"
    arguments = f"--resume {run_id}{board}"
    return f'to continue: sprawl run {source} {arguments}\n         or: make run CONFIG={source} ARGS="{arguments}"'


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM is Ctrl-C: stop in order, print how to resume."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
