"""Which run an island belongs to: newer ones on the board are found here."""

from __future__ import annotations

import logging
import time

from sprawl.board.ledger import find_run
from sprawl.board.reader import VersionReader
from sprawl.board.records import RunRecord
from sprawl.board.signing import Trust
from sprawl.board.store import Store
from sprawl.errors import SprawlError

log = logging.getLogger(__name__)

PAUSE_S = 60.0  # before a run that could not be taken over is tried again


class RunWatcher:
    """Finds the newest run that began after `current` and has something to serve. Blocking; lists the board."""

    def __init__(self, store: Store, current: RunRecord, trust: Trust | None = None) -> None:
        self.current = current
        self._store = store
        self._trust = trust
        self._older: set[str] = set()
        self._not_before: dict[str, float] = {}

    def look(self) -> RunRecord | None:
        """None, too, when the board cannot be read."""
        try:
            for record in sorted(self._newer(), key=_age, reverse=True):
                if time.monotonic() < self._not_before.get(record.run_id, 0.0):
                    continue
                if VersionReader(self._store, record.run_id, trust=self._trust).head() is not None:
                    return record
        except SprawlError as error:
            log.warning("newer runs were not looked for: %s", error)
        return None

    def postpone(self, run_id: str) -> None:
        """Do not name this run for a while."""
        self._not_before[run_id] = time.monotonic() + PAUSE_S

    def _newer(self) -> list[RunRecord]:
        newer = []
        for name in self._store.children(""):
            record = None if name in self._older else find_run(self._store, name)
            if record is not None and _age(record) > _age(self.current):
                newer.append(record)
            elif record is not None:
                self._older.add(name)  # for good: `current` only becomes newer
        return newer


def _age(record: RunRecord) -> tuple[float, str]:
    return record.created_at, record.run_id
