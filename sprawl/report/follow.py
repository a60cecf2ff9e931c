"""A run's ledger, followed while it grows: what was read once is not read again, and memory does not grow with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from sprawl.board import keys
from sprawl.board.records import EvaluationRecord, EventRecord, FireRecord, Record, StepRecord
from sprawl.report.data import RunData

if TYPE_CHECKING:
    from sprawl.board.ledger import Ledger

KEEP_STEPS = 1000
"""Newest steps a follower holds (about 5 kB each)."""

R = TypeVar("R", bound=Record)


class RunFollower:
    """`refresh` costs one read a new record and a listing each of evaluations, fires, events and islands. Not for
    several threads at once."""

    def __init__(self, ledger: Ledger, keep_steps: int = KEEP_STEPS) -> None:
        self._ledger = ledger
        self._keep = keep_steps
        self._run = ledger.run()
        self._steps: dict[int, StepRecord] = {}
        self._read_to = 0
        self._evaluations: dict[str, EvaluationRecord] = {}
        self._fires: dict[str, FireRecord] = {}
        self._events: dict[str, EventRecord] = {}

    def refresh(self, head: int) -> RunData:
        """The run as its ledger says now, its steps up to `head` (the newest one committed): the newest `keep_steps`.

        Raises BoardError when the board cannot be read; the next call goes on where this one stopped.
        """
        ledger, run_id = self._ledger, self._ledger.run_id
        since = max(1, head - self._keep + 1)
        for step in range(max(since, self._read_to + 1), head + 1):
            record = ledger.step(step)
            if record is not None:
                self._steps[step] = record
            self._read_to = step
        for step in [step for step in self._steps if step < since]:
            del self._steps[step]
        _extend(ledger, keys.evaluations(run_id), EvaluationRecord, self._evaluations)
        _extend(ledger, keys.fires(run_id), FireRecord, self._fires)
        _extend(ledger, keys.events(run_id), EventRecord, self._events)
        return RunData.of(
            self._run,
            self._steps.values(),
            self._evaluations.values(),
            # The run goes on meanwhile: a fire of a step that was not read would be one too many.
            [record for record in self._fires.values() if record.step <= head],
            self._events.values(),
            ledger.islands(),
            since=since,
        )


def _extend(ledger: Ledger, prefix: str, kind: type[R], known: dict[str, R]) -> None:
    known.update(ledger.read_new(prefix, kind, known))
