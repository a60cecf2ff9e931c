"""Columns of the ledger as curves: what the figures of one run share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sprawl.report.data import RunData
from sprawl.report.numbers import rolling_mean
from sprawl.report.style import MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTH = 10  # steps in the moving means


def step_numbers(data: RunData) -> list[int]:
    return [record.step for record in data.steps]


def smooth_window(count: int) -> int:
    """10 steps, fewer while a run is young."""
    return min(SMOOTH, max(1, count // 3))


def probed(data: RunData, values: Sequence[float | None]) -> tuple[list[int], list[float]]:
    """The steps that have a value, and the values."""
    pairs = [(record.step, value) for record, value in zip(data.steps, values, strict=True) if value is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def smoothed(ax: Axes, steps: Sequence[int], values: Sequence[float], colour: str) -> float:
    """Faint raw points and their moving mean; returns the last mean."""
    window = smooth_window(len(values))
    means = rolling_mean(values, window)
    ax.plot(steps, values, ".", color=colour, alpha=0.4, markersize=5, markeredgewidth=0)
    ax.plot(steps[window - 1 :], means, color=colour, linewidth=1.8)
    return means[-1]


def fire_ticks(ax: Axes, data: RunData) -> None:
    for record in data.fires:
        ax.axvline(record.step, ymax=0.05, color=MUTED, linewidth=1.0)


def compressed(data: RunData) -> bool:
    """Whether the two views differ at all: with the dense codec they are the same computation."""
    return data.setting("boundary.codec") != "dense"
