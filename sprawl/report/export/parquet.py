"""The steps of a run as one parquet file, brought up to date from the ledger.

The file is derived: it holds the steps 1 to n of the ledger, each once, whatever was killed or resumed in between, and
can be made again at any time. What is in it is not read again from the ledger, except to see that it is this run's.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.records import EvaluationRecord
from sprawl.board.store import MissingKey, Store
from sprawl.errors import SprawlError
from sprawl.report.export.rows import FLAT, Value, columns, row

if TYPE_CHECKING:
    import pyarrow

RUN = b"sprawl.run"
CREATED = b"sprawl.created_at"

_TYPES = {int: "int64", float: "float64", bool: "bool_", str: "string"}


def arrow() -> Any:
    """The pyarrow package. Raises SprawlError when it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise SprawlError("parquet files need pyarrow", "pip install 'sprawl-rl[metrics]'") from None
    return pyarrow


def table_of(rows: list[dict[str, Value]], run_id: str, created_at: float) -> pyarrow.Table:
    """Rows as a table whose metadata names the run. Columns beyond FLAT are numbers (seconds, groups of islands)."""
    pa = arrow()
    names = columns(rows)
    kinds = {name: getattr(pa, _TYPES[FLAT[name]])() if name in FLAT else _extra(pa, name) for name in names}
    schema = pa.schema(list(kinds.items()), {RUN: run_id.encode(), CREATED: repr(created_at).encode()})
    return pa.table({name: pa.array([entry.get(name) for entry in rows], kinds[name]) for name in names}, schema)


def encode(table: pyarrow.Table) -> bytes:
    pa = arrow()
    buffer = io.BytesIO()
    pa.parquet.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def decode(data: bytes) -> pyarrow.Table:
    """Raises pyarrow.ArrowException for bytes that are no parquet file."""
    return arrow().parquet.read_table(io.BytesIO(data))


def up_to_date(ledger: Ledger, head: int, known: pyarrow.Table | None) -> pyarrow.Table:
    """The steps 1 to `head`, as far as they are on the ledger without a gap; those in `known` are taken from it.

    Evaluations come from the ledger anew each time: one may be entered long after its step.
    """
    pa = arrow()
    run = ledger.run()
    have = known if known is not None and _fits(known, run.run_id, run.created_at) else None
    evaluations = {record.version: record for record in ledger.evaluations()}
    fresh: list[dict[str, Value]] = []
    done = 0 if have is None else have.num_rows
    for step in range(done + 1, head + 1):
        record = ledger.step(step)
        if record is None:
            break
        fresh.append(row(record, evaluations.get(record.version)))
    new = table_of(fresh, run.run_id, run.created_at)
    if have is None:
        return new
    joined = pa.concat_tables([have, new], promote_options="permissive") if fresh else have
    return _with_evaluations(joined, evaluations).replace_schema_metadata(new.schema.metadata)


def write_parquet(store: Store, run_id: str, head: int) -> pyarrow.Table:
    """Bring `metrics/steps.parquet` on the board up to step `head`; returns what it then holds."""
    key = keys.parquet(run_id)
    table = up_to_date(Ledger(store, run_id), head, read_parquet(store, run_id))
    store.put(key, encode(table))
    return table


def read_parquet(store: Store, run_id: str) -> pyarrow.Table | None:
    """The table on the board; None when there is none, or one that cannot be read."""
    try:
        return decode(store.get(keys.parquet(run_id)))
    except (MissingKey, arrow().ArrowException, OSError):
        return None


def _extra(pa: Any, name: str) -> Any:
    return pa.int64() if name.startswith("islands/") else pa.float64()


def _fits(table: pyarrow.Table, run_id: str, created_at: float) -> bool:
    """Whether it is of this very run, of this release's columns, and has the steps 1 to n."""
    about = table.schema.metadata or {}
    if about.get(RUN) != run_id.encode() or about.get(CREATED) != repr(created_at).encode():
        return False
    if not set(FLAT) <= set(table.column_names):
        return False
    return table.column("step").to_pylist() == list(range(1, table.num_rows + 1))


def _with_evaluations(table: pyarrow.Table, evaluations: dict[int, EvaluationRecord]) -> pyarrow.Table:
    pa = arrow()
    records = [evaluations.get(version) for version in table.column("version").to_pylist()]
    values: dict[str, list[Any]] = {
        "evaluation/accuracy": [record and record.accuracy for record in records],
        "evaluation/problems": [record and record.problems for record in records],
    }
    for name, column in values.items():
        index = table.column_names.index(name)
        field = table.schema.field(index)
        table = table.set_column(index, field, pa.array(column, field.type))
    return table
