"""Waiting at a mirror for the next version of a run, so that the reader need not ask for it.

One thread holds one request open. While it does, and the board itself said not long ago that the version is not there,
"not there yet" is an answer that costs no request.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from sprawl.mirror.choice import Choice
from sprawl.mirror.client import Mirror, MirrorProblem
from sprawl.mirror.objects import ManifestKey

HOLD_S = 20.0  # how long a mirror is asked to hold a request
STRIKES = 2  # versions in a row that the board had and the mirror did not tell
LAGGING_REST_S = 60.0


class Watch:
    """Of one run; thread-safe. `check_s`: how long a mirror's silence is believed before the board itself is asked,
    which bounds how late a reader can be when a mirror lies.

    `arrived(mirror, key, data)` is called in the thread with what the mirror sent, unchecked. It says whether the data
    vouches for itself, and raises MirrorProblem when it should and does not.
    """

    def __init__(self, choice: Choice, check_s: float, arrived: Callable[[Mirror, ManifestKey, bytes], bool]) -> None:
        self._choice = choice
        self._check_s = check_s
        self._arrived = arrived
        self._state = threading.Condition()
        self._target: ManifestKey | None = None
        self._holding: ManifestKey | None = None  # what a mirror is being asked for
        self._believed_until = 0.0
        self._head = -1  # newest version that is known to be there
        self._announced: ManifestKey | None = None  # by a mirror, and not seen on the board yet
        self._strikes = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def absent(self, key: ManifestKey) -> bool:
        """Whether the version is known not to be there yet."""
        with self._state:
            return self._holding == key and time.monotonic() < self._believed_until

    def missing(self, key: ManifestKey) -> None:
        """The board does not have this version now: wait for it, if it is the next one."""
        with self._state:
            if self._announced == key:
                self._announced, self._strikes = None, STRIKES  # announced, and not there: a lie
            hole = key.version <= self._head
            if not hole and (self._target is None or key.version <= self._target.version):
                self._aim(key)

    def present(self, key: ManifestKey, *, seen_on_board: bool) -> None:
        """The version is there. A mirror that is being asked for it, and did not say so first, missed it."""
        with self._state:
            self._head = max(self._head, key.version)
            if self._announced == key:
                self._announced = None
            elif self._holding == key and seen_on_board:
                self._strikes += 1
            if self._target is not None and self._target.version <= self._head:
                self._target = None

    def close(self) -> None:
        with self._state:
            self._closed = True
            self._state.notify()

    def _aim(self, key: ManifestKey) -> None:
        """The lock is held."""
        self._target = key
        self._believed_until = time.monotonic() + self._check_s * random.uniform(0.8, 1.2)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"versions of {key.run_id}", daemon=True)
            self._thread.start()
        self._state.notify()

    def _run(self) -> None:
        while (target := self._next()) is not None:
            mirror = self._choice.first()
            if mirror is None:
                self._stop_holding()
                continue
            try:
                self._ask(mirror, target)
            except MirrorProblem as problem:
                if self._closed:
                    return
                self._stop_holding()
                self._choice.failed(mirror, problem)

    def _next(self) -> ManifestKey | None:
        """What to wait for; None when closed."""
        with self._state:
            if self._target != self._holding:
                self._holding = None
            while self._target is None and not self._closed:
                self._state.wait()
            return None if self._closed else self._target

    def _stop_holding(self) -> None:
        """The reader asks the board; its answer aims again."""
        with self._state:
            self._holding = self._target = None

    def _ask(self, mirror: Mirror, target: ManifestKey) -> None:
        with self._state:
            if self._strikes >= STRIKES:
                self._strikes = 0
                raise MirrorProblem(mirror.url, "is late, or wrong, about which versions there are", LAGGING_REST_S)
            self._holding = target
        data = mirror.manifest(target, HOLD_S)
        if data is None:
            return
        self._choice.worked(mirror)
        with self._state:
            self._strikes = 0
            if target.version > self._head:
                self._announced = target
        vouches = self._arrived(mirror, target, data)
        with self._state:
            if vouches:
                self._head, self._announced = max(self._head, target.version), None
            self._holding = None
            if self._target == target:
                self._target = None
                if vouches:
                    # What vouches for itself shows that the mirror keeps up: its silence is believed from now on.
                    self._aim(target.following)
