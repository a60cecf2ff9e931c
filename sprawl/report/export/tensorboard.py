"""The steps of a run as TensorBoard event files.

A file holds a fixed range of steps and follows from the ledger byte for byte, so it is never written twice with
different content: whatever was killed or resumed, each step is in exactly one file once. TensorBoard takes the files
of a directory together.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sprawl.board.records import EvaluationRecord
from sprawl.errors import SprawlError
from sprawl.report.export.rows import curves

if TYPE_CHECKING:
    from sprawl.board.store import Store

STEPS_A_FILE = 20

PREFIX = "events.out.tfevents."


def protos() -> tuple[Any, Any, Any]:
    """TensorBoard's Event, Summary and RecordWriter. Raises SprawlError when the package is not installed."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        raise SprawlError("TensorBoard events need tensorboard", "pip install 'sprawl-rl[metrics]'") from None
    return Event, Summary, RecordWriter


def ranges(head: int, *, rest: bool) -> list[tuple[int, int]]:
    """First and last step of each file of a run at `head`; with `rest` also of the last one, which may be shorter."""
    whole = [(last - STEPS_A_FILE + 1, last) for last in range(STEPS_A_FILE, head + 1, STEPS_A_FILE)]
    left = head % STEPS_A_FILE
    return [*whole, (head - left + 1, head)] if left and rest else whole


def steps_file(rows: Sequence[dict[str, Any]]) -> bytes:
    """An event file of these rows (see `rows.row`): a scalar each for everything that is worth a curve."""
    return _file((entry["step"], entry["finished_at"], curves(entry)) for entry in rows)


def evaluation_file(record: EvaluationRecord) -> bytes:
    """An event file of one evaluation, at the step whose version was evaluated."""
    values = {"evaluation/accuracy": record.accuracy, "evaluation/problems": float(record.problems)}
    return _file([(record.step, record.finished_at, values)])


def sync(
    store: Store,
    prefix: str,
    head: int,
    rows: Callable[[int, int], Sequence[dict[str, Any]]],
    evaluations: Iterable[EvaluationRecord],
    *,
    rest: bool,
) -> list[str]:
    """Make the event files under `prefix` (a folder, "" or ending in "/") those of a run at step `head`.

    `rows(first, last)` gives the rows of these steps. Files that are there already stay as they are; a shorter last one
    of an earlier export goes once its steps are in a longer one. Returns the names of the new ones.
    """
    wanted = {f"{PREFIX}{first:08d}-{last:08d}.steps": (first, last) for first, last in ranges(head, rest=rest)}
    judged = {f"{PREFIX}{record.version:08d}.evaluation": record for record in evaluations}
    there = {name for name in store.children(prefix) if name.startswith(PREFIX)}
    written = []
    for name in [*wanted, *judged]:
        if name in there:
            continue
        data = steps_file(rows(*wanted[name])) if name in wanted else evaluation_file(judged[name])
        store.create(prefix + name, data)
        written.append(name)
    for name in there - set(wanted) - set(judged):
        store.delete(prefix + name)
    return written


def _file(entries: Iterable[tuple[int, float, dict[str, float]]]) -> bytes:
    event, summary, writer = protos()
    buffer = io.BytesIO()
    out = writer(buffer)
    for index, (step, at, values) in enumerate(entries):
        if index == 0:
            out.write(event(wall_time=at, file_version="brain.Event:2").SerializeToString(deterministic=True))
        scalars = summary(value=[summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        out.write(event(wall_time=at, step=step, summary=scalars).SerializeToString(deterministic=True))
    out.flush()
    return buffer.getvalue()
