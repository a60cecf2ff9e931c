"""When fires are: every c steps, and where the drift controller asked for one in between. Pure.

A fire is requested before its step is committed, and fires happen in order, because M folds: once a step is committed,
nothing changes any more for the fires up to it.
"""

from __future__ import annotations

from collections.abc import Collection


def open_requests(requested: Collection[int], next_regular: int, every: int) -> list[int]:
    """Fires that were asked for between the last regular one that has happened and the next, ascending."""
    return sorted(step for step in requested if next_regular - every < step < next_regular)


def fires_before(step: int, requested: Collection[int], every: int, after: int = 0) -> list[int]:
    """Fires whose sign map step `step` may use and that are newer than fire `after`, newest first."""
    regular = range((step - 1) // every * every, after, -every)
    return sorted({*regular, *(fire for fire in requested if after < fire < step)}, reverse=True)
