"""The report page of a run that is over. Light to import: flows do, before anything of a run is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sprawl.run.session import RunSession


class Notes(Protocol):
    def note(self, text: str) -> None: ...


def drawn(session: RunSession, progress: Notes, write: Callable[[RunSession, str], str]) -> Path | None:
    """The page that `write(session, directory)` writes. A run that is over is over, whether or not its page could be
    drawn: then None, and a note."""
    try:
        return Path(write(session, str(Path("reports") / session.run_id)))
    except Exception as error:
        progress.note(f"no report page ({error}); try: sprawl report {session.run_id} --board {session.board}")
        return None
