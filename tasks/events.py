"""What a run tells Prefect's event system, so that automations can act on it. The names are in `sprawl.event_names`.

| event | when | labels of the resource besides its id and name |
|---|---|---|
| `sprawl.version.published` | a version was committed | `sprawl.every-<n>`: "true" for each n of EVERY dividing it |
| `sprawl.anchor.fired` | the anchor committed a fire | |
| `sprawl.island.lost` | an island ended without being told to | |
| `sprawl.run.unhealthy` | see `sprawl.report.health` | `sprawl.reason` |
| `sprawl.run.finished` | the last step is done and checked | |
| `sprawl.version.promoted` | a person decided (flows/promote.py) | `sprawl.approved`: "true" or "false" |

The resource is `sprawl.run.<run_id>`. Events can be lost (a server that is away, a process that is killed), so they are
derived from the ledger, where nothing is: an `Announcer` tells of everything that is new on it, each thing once, and a
run that resumes tells of its newest version again. An event's id follows from what it says, so a repeated one is
stored once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from sprawl.event_names import (
    ANCHOR_FIRED,
    EVERY,
    ISLAND_LOST,
    REASON,
    RUN_FINISHED,
    RUN_UNHEALTHY,
    VERSION_PUBLISHED,
    every,
    resource,
)
from sprawl.report.data import RunData
from sprawl.report.health import Finding

REPEAT_STEPS = 100
"""A run that stays unhealthy says so again after this many steps."""


@dataclass(frozen=True)
class Occurrence:
    """Something to tell. `identity` is what it is, within its run and event; `at` in Unix seconds."""

    event: str
    identity: str
    at: float
    payload: dict[str, Any]
    labels: dict[str, str] = field(default_factory=dict)


Tell = Callable[[str, Occurrence], None]


def emit(run_id: str, occurrence: Occurrence) -> None:
    """Queue the event; returns at once, whether or not a server answers."""
    from prefect.events import emit_event

    emit_event(
        event=occurrence.event,
        id=uuid5(NAMESPACE_URL, f"{run_id}/{occurrence.event}/{occurrence.identity}"),
        occurred=datetime.fromtimestamp(occurrence.at, UTC),
        resource={
            "prefect.resource.id": resource(run_id),
            "prefect.resource.name": run_id,
            **occurrence.labels,
        },
        payload={"run_id": run_id, **occurrence.payload},
    )


def published(version: int, at: float, **payload: Any) -> Occurrence:
    labels = {every(n): "true" for n in EVERY if version % n == 0}
    return Occurrence(VERSION_PUBLISHED, str(version), at, {"version": version, **payload}, labels)


def occurrences(data: RunData, findings: Sequence[Finding], now: float) -> list[Occurrence]:
    """Everything that a ledger has to tell. Pure; `findings` are those of the same data."""
    found = [published(r.version, r.finished_at, step=r.step, kind=r.kind) for r in data.steps]
    found += [
        Occurrence(ANCHOR_FIRED, str(r.step), r.finished_at, {"step": r.step, "newest_step": r.newest_step})
        for r in data.fires
    ]
    found += [
        Occurrence(ISLAND_LOST, f"{r.at}-{r.message}", r.at, {"step": r.step, "message": r.message})
        for r in data.events
        if r.kind == "island_lost"
    ]
    for finding in findings:
        identity = finding.message if finding.step == 0 else f"{finding.reason}-{finding.step // REPEAT_STEPS}"
        payload = {"reason": finding.reason, "step": data.last_step, "message": finding.message}
        found.append(Occurrence(RUN_UNHEALTHY, identity, now, payload, {REASON: finding.reason}))
    found += [
        Occurrence(RUN_FINISHED, str(r.step), r.at, {"step": r.step, "message": r.message})
        for r in data.events
        if r.kind == "finish"
    ]
    return found


class Announcer:
    """Tells what is new, once. May be used from several threads.

    `began` (Unix seconds) and `head` (the newest committed version then) say what is old news: what an earlier process
    of the run had to tell. Its newest version is told again: that process may have been killed before it did.
    """

    def __init__(self, run_id: str, board: str, *, head: int, began: float, tell: Tell = emit) -> None:
        self._run_id = run_id
        self._board = board
        self._head = head
        self._began = began
        self._tell = tell
        self._told: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def version(self, version: int, at: float, **payload: Any) -> None:
        """A version was just published; the next `catch_up` will find it on the ledger, too."""
        with self._lock:
            self._once(published(version, at, **payload))

    def catch_up(self, found: Sequence[Occurrence]) -> list[Occurrence]:
        """Tell of what is new in `found`, which is all that the ledger has to tell; returns that."""
        with self._lock:
            new = [occurrence for occurrence in found if self._once(occurrence)]
            # Versions that the reader of the ledger let go of cannot come again: this does not grow with the run.
            oldest = min((int(item.identity) for item in found if item.event == VERSION_PUBLISHED), default=0)
            self._told = {key for key in self._told if key[0] != VERSION_PUBLISHED or int(key[1]) >= oldest}
        return new

    def _once(self, occurrence: Occurrence) -> bool:
        key = (occurrence.event, occurrence.identity)
        if key in self._told:
            return False
        self._told.add(key)
        if self._is_old(occurrence):
            return False
        self._tell(self._run_id, replace(occurrence, payload={"board": self._board, **occurrence.payload}))
        return True

    def _is_old(self, occurrence: Occurrence) -> bool:
        if occurrence.event == VERSION_PUBLISHED:
            return int(occurrence.identity) < self._head
        return occurrence.at < self._began
