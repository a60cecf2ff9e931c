"""Push versus floor, drawn: size of updates against weight magnitude, the visibility floor, and the shares behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sprawl.delta.stats import DecadeStats, DeltaStats
from sprawl.errors import SprawlError
from sprawl.report.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    VERMILLION,
    figure_bytes,
    log_axis,
    new_figure,
    set_labels,
    set_title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FEW = 1e-6  # binades with a smaller share of the weights are left out of the figure


def push_floor_png(stats: DeltaStats) -> bytes:
    """PNG bytes. Raises SprawlError when the checkpoints have no weights in common."""
    total = sum(binade.elements for binade in stats.binades)
    shown = [b for b in reversed(stats.binades) if b.exponent is not None and b.elements > _FEW * total]
    if not shown:
        raise SprawlError("nothing to draw: the checkpoints have no floating-point weights of one form in common")
    figure, (updates, shares) = new_figure(1, 2, (11.0, 4.2))
    _draw_updates(updates, stats, shown)
    _draw_shares(shares, shown)
    return figure_bytes(figure)


def _edges(binade: DecadeStats) -> tuple[float, float]:
    exponent = binade.exponent or 0
    return 2.0**exponent, 2.0 ** (exponent + 1)


def _draw_updates(ax: Axes, stats: DeltaStats, shown: list[DecadeStats]) -> None:
    low, high = _edges(shown[0])[0], _edges(shown[-1])[1]
    cells = [cell for cell in stats.cells if low <= 2.0**cell.binade < high and cell.step > 0]
    most = max((cell.count for cell in cells), default=1)
    for visible, colour in ((False, MUTED), (True, BLUE)):
        some = [cell for cell in cells if cell.visible == visible]
        if not some:
            continue
        ax.scatter(
            [2.0**cell.binade * 1.41 for cell in some],
            [cell.step for cell in some],
            s=[4 + 60 * (cell.count / most) ** 0.5 for cell in some],
            color=colour,
            alpha=0.55,
            linewidths=0,
        )
        label = "served value changed" if visible else "absorbed by rounding"
        ax.plot([], [], "o", color=colour, alpha=0.55, markersize=5, label=label)
    x = [edge for binade in shown for edge in _edges(binade)]
    floor = [binade.floor for binade in shown for _ in (0, 1)]
    ax.plot(x, floor, color=VERMILLION, linewidth=1.8, label="floor: half the spacing of served values")
    if stats.push is not None:
        ax.axhline(stats.push, color=GREEN, linewidth=1.8, label=f"push {stats.push:.1e} ({stats.push_is})")
    ax.set_xlim(low, high)
    log_axis(ax, "x", "{:.0e}".format)
    log_axis(ax, "y", "{:.0e}".format)
    set_labels(ax, "size of the update", "magnitude of the weight")
    ax.legend(fontsize=7.5, frameon=False, labelcolor=INK, loc="upper left")
    set_title(ax, "A served weight changes where the push clears the floor")


def _draw_shares(ax: Axes, shown: list[DecadeStats]) -> None:
    x = [_edges(binade)[0] * 1.41 for binade in shown]
    measured = [binade.changed / binade.elements for binade in shown]
    ax.plot(x, measured, "o", color=BLUE, markersize=4.5, label="measured")
    if all(binade.predicted is not None for binade in shown):
        ax.plot(x, [b.predicted or 0.0 for b in shown], color=GREEN, linewidth=1.8, label="predicted: push / spacing")
    ax.set_xlim(_edges(shown[0])[0], _edges(shown[-1])[1])
    log_axis(ax, "x", "{:.0e}".format)
    positive = [share for share in measured if share > 0]
    if positive:
        ax.set_ylim(min(positive) / 2, 1.5)
        log_axis(ax, "y", "{:.3%}".format)
    set_labels(ax, "share of weights changed", "magnitude of the weight")
    ax.legend(fontsize=7.5, frameon=False, labelcolor=INK, loc="lower left")
    total, changed = sum(b.elements for b in shown), sum(b.changed for b in shown)
    set_title(ax, f"{changed / total:.2%} of {total:,} weights changed")
