"""Where the lines of a job's output go."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

KEPT = 30
TOGETHER = 100


class Output:
    """Lines go to the worker's terminal. Until the flow run has started they also go to its log in Prefect: that is
    where one looks for why it does not start. From then on the flow run logs for itself, and lines sent twice would
    only be in the way; the last of them are kept in case it ends badly.

    Called from the threads that follow launch and job.
    """

    def __init__(self, name: str, show: Callable[[str], None], log: Callable[[str], None]) -> None:
        self._name, self._show, self._log = name, show, log
        self._lock = threading.Lock()
        self._last: deque[str] = deque(maxlen=KEPT)
        self._waiting: list[str] = []
        self.flow_started = False

    def line(self, text: str) -> None:
        self._show(f"{self._name} | {text}")
        with self._lock:
            self._last.append(text)
            if not self.flow_started:
                self._waiting.append(text)

    def flush(self) -> None:
        """Send what came since the last time, several lines to one message of the log."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), TOGETHER):
            self._log("\n".join(waiting[start : start + TOGETHER]))

    def last(self) -> str:
        with self._lock:
            return "\n".join(self._last)
