"""When a group is a straggler: it takes longer than nearly all groups of its size did lately."""

from __future__ import annotations

import math
from collections import deque

HISTORY = 256  # durations remembered per size
ENOUGH = 8  # durations needed before anything is called slow
SHARE = 0.1  # of all answers may be asked for twice, so that a slow fleet is not asked for twice the work


class Latencies:
    """Durations of answers, kept apart by the size of what was asked (bucketed by powers of two)."""

    def __init__(self, percentile: float) -> None:
        self._percentile = percentile
        self._seen: dict[int, deque[float]] = {}

    def add(self, size: int, seconds: float) -> None:
        self._seen.setdefault(size.bit_length(), deque(maxlen=HISTORY)).append(seconds)

    def patience(self, size: int) -> float | None:
        """Seconds after which a group of `size` is a straggler; None while too few were seen."""
        seen = self._seen.get(size.bit_length(), ())
        if len(seen) < ENOUGH:
            return None
        return sorted(seen)[min(len(seen), math.ceil(self._percentile * len(seen))) - 1]


def within_budget(hedges: int, answers: int) -> bool:
    """Whether one more second request stays within `SHARE` of the answers so far (one is always allowed)."""
    return hedges < 1 + SHARE * answers
