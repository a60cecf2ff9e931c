"""Metrics for other tools on the board itself: the parquet file and the TensorBoard events."""

from __future__ import annotations

from importlib.util import find_spec

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.store import Store
from sprawl.report.export import parquet, tensorboard

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
