"""Which mirror a reader uses now: found on the board, left alone for a while after it was of no use."""

from __future__ import annotations

import logging
import random
import threading
import time

import httpx

from sprawl.board.store import Store
from sprawl.errors import BoardError
from sprawl.mirror.client import MAX_REST_S, Mirror, MirrorProblem, http_client
from sprawl.mirror.registry import discover

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 300.0  # for better mirrors, while there is one
LOOK_FOR_ANY_S = 15.0  # while there is none; doubled while none is found, up to LOOK_AGAIN_S


class Choice:
    """Thread-safe. `slowest` in bytes per second, see Mirror."""

    def __init__(self, board: Store, region: str, reader_id: str, *, token: str | None, slowest: float = 1e6) -> None:
        self._board = board
        self._region = region
        self._reader_id = reader_id
        self._client: httpx.Client = http_client(token)
        self._slowest = slowest
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._mirrors: list[Mirror] = []
        self._lives: dict[str, tuple[str, float]] = {}  # id -> url and start of the life that is known
        self._rested_until: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._look_at = 0.0
        self._in_vain = 0  # looks in a row that found none

    def first(self) -> Mirror | None:
        """The mirror to ask; None: ask the board."""
        self._look()
        now = time.monotonic()
        with self._lock:
            return next((m for m in self._mirrors if self._rested_until.get(m.mirror_id, 0.0) <= now), None)

    def failed(self, mirror: Mirror, problem: MirrorProblem) -> None:
        """It was of no use: others, or the board, are asked for a while."""
        log.warning("%s; asking elsewhere", problem)
        if problem.rest_s is None:
            return
        with self._lock:
            failures = self._failures[mirror.mirror_id] = self._failures.get(mirror.mirror_id, 0) + 1
            rest = max(problem.rest_s, min(MAX_REST_S, problem.rest_s * 2 ** (failures - 1)))
            # Not all readers of a region at the same moment.
            self._rested_until[mirror.mirror_id] = time.monotonic() + rest * random.uniform(0.8, 1.2)
            if not any(self._rested_until.get(m.mirror_id, 0.0) <= time.monotonic() for m in self._mirrors):
                self._look_at = min(self._look_at, time.monotonic() + LOOK_FOR_ANY_S * random.uniform(0.5, 1.0))

    def worked(self, mirror: Mirror) -> None:
        with self._lock:
            self._failures.pop(mirror.mirror_id, None)

    def close(self) -> None:
        self._client.close()

    def _look(self) -> None:
        """Read the registry when it is time to; one thread does, the others go on with what is known."""
        if time.monotonic() < self._look_at or not self._looking.acquire(blocking=False):
            return
        try:
            records = discover(self._board, self._region, self._reader_id)
        except BoardError as error:
            log.warning("the list of mirrors could not be read: %s", error)
            records = None
        try:
            with self._lock:
                if records is not None:
                    for record in records:
                        life = (record.url, record.started_at)
                        if self._lives.get(record.mirror_id, life) != life:
                            self._rested_until.pop(record.mirror_id, None)  # a new life, a new chance
                        self._lives[record.mirror_id] = life
                    self._mirrors = [Mirror(self._client, r.mirror_id, r.url, slowest=self._slowest) for r in records]
                pause = LOOK_AGAIN_S if self._mirrors else min(LOOK_AGAIN_S, LOOK_FOR_ANY_S * 2**self._in_vain)
                self._in_vain = 0 if self._mirrors else min(self._in_vain + 1, 10)
                self._look_at = time.monotonic() + pause * random.uniform(0.8, 1.2)
        finally:
            self._looking.release()
