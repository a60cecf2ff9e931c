"""When fires are: every c steps, and where the drift controller asked for one in between. Pure."""

from __future__ import annotations

from collections.abc import Collection


def last_regular_fire(steps: int, every: int) -> int:
    """The last regular fire of a run of `steps` steps, 0 when it has none."""
    return steps - steps % every


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


def open_fires(next_regular: int, every: int, grid: int) -> range:
    """The next regular fire and all that can still be asked for before it; `grid` is the distance of checkpoints."""
    return range(next_regular - every + grid, next_regular + 1, grid)
