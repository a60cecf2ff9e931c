"""Metrics for other tools, kept up to date on the board while a run trains."""

from __future__ import annotations

import logging
import threading

from sprawl.board.store import Store
from sprawl.report.export import board

log = logging.getLogger(__name__)


class MetricsExport:
    """Keeps both up to date during a run, in a thread of its own: every `board.EVERY` steps and at the end.

    Without the extra it does nothing. What goes wrong is logged once, and is never a reason to fail a run: everything
    can be made again from the ledger (`sprawl metrics export`). Used from one thread.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._active = board.installed()
        self._complained = False
        self._thread: threading.Thread | None = None

    def step(self, step: int) -> None:
        """Step `step` is on the ledger. Returns at once; skipped while the last export is still under way."""
        if not self._active or step % board.EVERY or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._export, args=(step, False), daemon=True, name="metrics-export")
        self._thread.start()

    def finish(self, step: int) -> None:
        """The run is complete at `step`. Returns when it is written."""
        if not self._active:
            return
        if self._thread is not None:
            self._thread.join()
        self._export(step, True)

    def _export(self, step: int, rest: bool) -> None:
        try:
            board.export_to_board(self._store, self._run_id, step, rest=rest)
        except Exception as error:
            if not self._complained:
                log.warning("metrics for other tools not written (%s); `sprawl metrics export` makes them", error)
            self._complained = True
