"""When fires are: every c steps, and where the drift controller asked for one in between. Pure."""

from __future__ import annotations

from collections.abc import Collection


def next_fire(done: Collection[int], requested: Collection[int], every: int) -> int:
    """The first fire that has not happened. Fires happen in order, because M folds.

    A fire is requested before its step is committed, so once a step is committed this cannot change any more for the
    steps up to it.
    """
    regular = every
    while regular in done:
        regular += every
    return min([regular, *(step for step in requested if step not in done)])


def fires_before(step: int, requested: Collection[int], every: int, after: int) -> list[int]:
    """Fires whose sign map step `step` may use and that are newer than fire `after`, newest first."""
    regular = range((step - 1) // every * every, after, -every)
    return sorted({*regular, *(fire for fire in requested if after < fire < step)}, reverse=True)


def fire_before(step: int, done: Collection[int]) -> int | None:
    """The newest fire before `step` that has happened."""
    return max((fire for fire in done if fire < step), default=None)


def open_fires(next_regular: int, last: int, every: int, grid: int) -> range:
    """The fires up to step `last` from the next regular one on, and all that can still be asked for before and between
    them; `grid` is the distance of the steps at which a fire may be: c when only regular ones are."""
    return range(next_regular - every + grid, last + 1, grid)
