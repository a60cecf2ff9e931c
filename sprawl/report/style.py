"""One restrained look for every figure: colour-blind safe colours, direct labels, a light grid, units on axes.

Figures are built without pyplot, so that they can be drawn in any thread and leave no global state behind.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe-Ito. Blue is always what compression sees or sends, vermillion what dense would.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#AA5A94", "#C98A00", "#56B4E9"
INK, MUTED, GRID = "#24292f", "#6e7781", "#e4e7eb"
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)

STEP = "optimizer step"
_LINE = 0.07  # height of a line of a direct label, as a share of the axes' height


def new_figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = (6.4, 3.3)) -> tuple[Figure, list[Axes]]:
    """A figure of `size` inches with rows * columns styled axes, in reading order."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = [ax for row in grid for ax in row]
    for ax in axes:
        style_axes(ax)
    return figure, axes


def style_axes(ax: Axes) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(MUTED)
        ax.spines[side].set_linewidth(0.8)
    ax.grid(True, color=GRID, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(which="both", colors=MUTED, labelsize=8, length=3, width=0.8)


def _figure(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert figure is not None, "axes come from new_figure"
    return figure


def set_title(ax: Axes, reading: str) -> None:
    """Title that states the reading, left-aligned and wrapped to the width of the axes."""
    spec = ax.get_subplotspec()
    width = _figure(ax).get_figwidth() / (spec.get_gridspec().ncols if spec else 1)
    ax.set_title(textwrap.fill(reading, int(width * 10)), loc="left", fontsize=9.5, color=INK, fontweight="bold")


def set_labels(ax: Axes, y: str, x: str = STEP) -> None:
    if x == STEP:
        from matplotlib.ticker import MaxNLocator

        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    ax.set_xlabel(x, fontsize=8.5, color=MUTED)
    ax.set_ylabel(y, fontsize=8.5, color=MUTED)


def log_axis(ax: Axes, which: Literal["x", "y"], text: Callable[[float], str]) -> None:
    """Logarithmic axis with plain numbers; a range of less than two decades gets ticks at 2 and 5 as well."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    low, high = ax.get_xlim() if which == "x" else ax.get_ylim()
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def label_ends(ax: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Write (y value, text, colour) right of the axes at the height of y, moved apart where they would overlap.

    Call it after the limits of the axes are final.
    """
    labels = [entry for entry in labels if math.isfinite(entry[0])]
    if not labels:
        return
    to_axes = ax.transScale + ax.transLimits
    x = ax.get_xlim()[1]
    placed = sorted((float(to_axes.transform((x, y))[1]), text, colour) for y, text, colour in labels)
    line = _LINE * max(1.0, 3.3 / _figure(ax).get_figheight())
    heights = spread([height for height, _, _ in placed], [line * (1 + text.count("\n")) for _, text, _ in placed])
    for height, (_, text, colour) in zip(heights, placed, strict=True):
        ax.annotate(
            text,
            xy=(1.0, height),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=colour,
        )


def spread(centres: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Ascending centres of boxes of the given sizes, moved as little as needed so that none overlap.

    Centres stay in [0, 1] as long as there is room for all.
    """
    gaps = [(a + b) / 2 for a, b in pairwise(sizes)]
    result: list[float] = []
    for i, centre in enumerate(centres):
        floor = result[-1] + gaps[i - 1] if result else 0.0
        result.append(max(floor, min(1.0, centre)))
    ceiling = max(1.0, sum(gaps))
    for i in range(len(result) - 1, -1, -1):
        result[i] = min(result[i], ceiling)
        if i:
            ceiling = result[i] - gaps[i - 1]
    return result


def figure_bytes(figure: Figure, kind: Literal["png", "svg"] = "png", dpi: int = 150) -> bytes:
    """The figure as a file's bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    # No date in the file: the same ledger gives the same bytes.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    return buffer.getvalue()
