"""An anchor that kills itself (SIGKILL, nothing is cleaned up) just before its n-th write."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from sprawl.anchor.service import AnchorService, serve
from sprawl.board.store import open_store
from tests.anchor.board import RUN


class DeadlyStore:
    """A store whose n-th write does not happen any more."""

    def __init__(self, board: str, deadly: int) -> None:
        self._store, self._left = open_store(board), deadly

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._counted(found) if name in ("put", "create", "delete") else found

    def _counted(self, write: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            return write(*arguments)

        return counted


def main(board: str, deadly: int) -> None:
    """Serve until killed, or to the end of the run when there are fewer writes."""
    serve(AnchorService(DeadlyStore(board, deadly), RUN))  # type: ignore[arg-type]
