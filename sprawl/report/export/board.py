"""Metrics for other tools, kept on the board while a run trains: the parquet file and the TensorBoard events."""

from __future__ import annotations

import logging
import threading
from importlib.util import find_spec

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.store import Store
from sprawl.report.export import parquet, tensorboard

log = logging.getLogger(__name__)

EVERY = tensorboard.STEPS_A_FILE


def installed() -> bool:
    """Whether the extra `metrics` is there."""
    return find_spec("pyarrow") is not None and find_spec("tensorboard") is not None


def export_to_board(store: Store, run_id: str, head: int, *, rest: bool) -> None:
    """Bring both up to step `head`. `rest`: no more steps will come, so the last event file may be a short one.

    Reads from the ledger only what the parquet file does not have yet. Raises BoardError, or SprawlError without the
    extra.
    """
    table = parquet.write_parquet(store, run_id, head)

    def rows(first: int, last: int) -> list[dict]:
        return table.slice(first - 1, last - first + 1).to_pylist()

    evaluations = Ledger(store, run_id).evaluations()
    tensorboard.sync(store, keys.tensorboard(run_id), table.num_rows, rows, evaluations, rest=rest)


class MetricsExport:
    """Keeps both up to date during a run, in a thread of its own: every `EVERY` steps and at the end.

    Without the extra it does nothing. What goes wrong is logged once, and is never a reason to fail a run: everything
    can be made again from the ledger (`sprawl metrics export`). Used from one thread.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._active = installed()
        self._complained = False
        self._thread: threading.Thread | None = None

    def step(self, step: int) -> None:
        """Step `step` is on the ledger. Returns at once; skipped while the last export is still under way."""
        if not self._active or step % EVERY or (self._thread is not None and self._thread.is_alive()):
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
            export_to_board(self._store, self._run_id, step, rest=rest)
        except Exception as error:
            if not self._complained:
                log.warning("metrics for other tools not written (%s); `sprawl metrics export` makes them", error)
            self._complained = True
