"""The figures of a study: one a group, a panel a quantity, seeds as thin lines under their mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sprawl.board.records import StepRecord
from sprawl.report.numbers import finite, mean, rolling_mean
from sprawl.report.series import smooth_window
from sprawl.report.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    STEP,
    VERMILLION,
    log_axis,
    new_figure,
    set_labels,
    set_title,
)
from sprawl.report.text import number
from sprawl.study.config import Colour, GroupConfig, Panel
from sprawl.study.measures import ArmRuns, seconds_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue and vermillion are compression and dense in every figure: arms that do not ask for them get the others first.
_COLOURS: dict[Colour, str] = {
    "green": GREEN,
    "purple": PURPLE,
    "orange": ORANGE,
    "sky": SKY,
    "blue": BLUE,
    "vermillion": VERMILLION,
}
_ORDERED_MAP, _LIGHTEST, _DARKEST = "viridis_r", 0.15, 0.95
_SEED: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.35}
_MEAN: dict[str, Any] = {"linewidth": 2.0}
_TWO_VIEWS = ("entropy", "kl")
_CHARACTER = 0.085  # inches a character of the legend takes, and
_HANDLE = 0.75  # what stands before each name


@dataclass(frozen=True)
class Drawn:
    """One arm as it is drawn."""

    runs: ArmRuns
    colour: str


def group_figure(group: GroupConfig, arms: Sequence[ArmRuns]) -> Figure:
    """One figure of the arms that have a step, in reading order of the group's panels."""
    drawn = [Drawn(runs, colour) for runs, colour in zip(arms, colours(group, arms), strict=True) if runs.runs]
    count = len(group.panels)
    columns = count if count < 4 else (2 if count == 4 else 3)
    rows = -(-count // columns)
    figure, axes = new_figure(rows, columns, (5.6 * columns, 3.2 * rows + 0.9))
    for ax, panel in zip(axes, group.panels, strict=False):
        _PANELS[panel](ax, drawn)
    for ax in axes[count:]:
        ax.set_visible(False)
    figure.suptitle(group.title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    _legend(figure, drawn, group.panels)
    return figure


def colours(group: GroupConfig, arms: Sequence[ArmRuns]) -> list[str]:
    """A colour an arm: shades in order, or those the study names and the free ones for the rest."""
    if group.ordered:
        from matplotlib import colormaps
        from matplotlib.colors import to_hex

        step = (_DARKEST - _LIGHTEST) / max(1, len(arms) - 1)
        return [to_hex(colormaps[_ORDERED_MAP](_LIGHTEST + place * step)) for place in range(len(arms))]
    named = [runs.arm.colour for runs in arms]
    free = [hexa for name, hexa in _COLOURS.items() if name not in named] or list(_COLOURS.values())
    taken = 0
    result = []
    for name in named:
        if name is not None:
            result.append(_COLOURS[name])
        else:
            result.append(free[taken % len(free)])
            taken += 1
    return result


def short_labels(labels: Sequence[str]) -> list[str]:
    """Without the parts, separated by commas, that all of them share: `prf, staleness 4` among other prf ones is
    `staleness 4`."""
    parts = [label.split(", ") for label in labels]
    shared = set.intersection(*(set(of) for of in parts)) if len(parts) > 1 else set()
    return [
        ", ".join(part for part in of if part not in shared) or label for of, label in zip(parts, labels, strict=True)
    ]


def _legend(figure: Figure, drawn: Sequence[Drawn], panels: Sequence[Panel]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Line2D | Patch] = [Line2D([], [], color=entry.colour, linewidth=2.4) for entry in drawn]
    names = short_labels([entry.runs.label for entry in drawn])
    seeds = {seed for entry in drawn for seed in entry.runs.seeds}
    if len(seeds) > 1:
        handles.append(Line2D([], [], color=MUTED, linewidth=0.8))
        names.append(f"one of {len(seeds)} seeds")
    if any(panel in _TWO_VIEWS for panel in panels):
        handles.append(Line2D([], [], color=MUTED, linewidth=1.2, linestyle="--"))
        names.append("dense view")
    if any(_collapses(entry) for entry in drawn):
        handles.append(Patch(color=MUTED, alpha=0.2, linewidth=0))
        names.append("collapse")
    widths, room = [_HANDLE + _CHARACTER * len(name) for name in names], figure.get_figwidth()
    columns = len(names) if sum(widths) <= room else max(1, int(room / max(widths)))
    figure.legend(handles, names, loc="outside lower left", ncols=columns, frameon=False, fontsize=9, labelcolor=INK)


def _collapses(entry: Drawn) -> list[int]:
    """The steps at which runs of an arm collapsed or stopped by themselves."""
    found = entry.runs.verdicts().values()
    return [verdict.step for verdict in found if verdict.kind in ("collapsed", "stopped") and verdict.step is not None]


def _column(
    runs: ArmRuns, of: Callable[[StepRecord], float | None], *, codec: bool = False
) -> list[list[tuple[int, float]]]:
    """For every run its (step, value) pairs, those without a value left out; with `codec` dense steps too."""
    curves = []
    for data in runs.cut:
        pairs = [(record.step, of(record)) for record in (data.codec_steps if codec else data.steps)]
        curves.append([(step, value) for step, value in pairs if value is not None and finite([value])])
    return curves


def mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """The mean over the runs at every step that all of them have. A run that ended early ends the mean."""
    if not curves:
        return []
    tables = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    return [(step, sum(table[step] for table in tables) / len(tables)) for step in steps]


def _draw(
    ax: Axes,
    drawn: Sequence[Drawn],
    of: Callable[[StepRecord], float | None],
    *,
    smooth: bool = False,
    codec: bool = False,
) -> None:
    """Thin lines of every seed and their mean; with `smooth` all are moving means over 10 steps. `codec`: dense steps
    of compressed runs, which say nothing about it, are left out."""
    for entry in drawn:
        steps = sorted(_collapses(entry))
        if steps:
            ax.axvspan(steps[0] - 1, steps[-1] + 1, color=entry.colour, alpha=0.2, linewidth=0)
        curves = _column(entry.runs, of, codec=codec)
        if smooth:
            curves = [_smoothed(curve) for curve in curves]
        if len(curves) > 1:
            for curve in curves:
                ax.plot(*_xy(curve), color=entry.colour, **_SEED)
        ax.plot(*_xy(mean_curve(curves)), color=entry.colour, **_MEAN)


def _dashed(ax: Axes, drawn: Sequence[Drawn], of: Callable[[StepRecord], float | None]) -> None:
    for entry in drawn:
        ax.plot(*_xy(mean_curve(_column(entry.runs, of))), "--", color=entry.colour, linewidth=1.2)


def _smoothed(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    window = smooth_window(len(curve))
    means = rolling_mean([value for _, value in curve], window)
    return [(x, value) for (x, _), value in zip(curve[window - 1 :], means, strict=True)]


def _xy(curve: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]


def _finish(ax: Axes, title: str, unit: str, x: str = STEP, top: float | None = None) -> None:
    set_title(ax, title)
    set_labels(ax, unit, x)
    ax.set_xlim(left=0)
    if ax.get_yscale() == "linear":
        ax.set_ylim(0, top)


def _reward(ax: Axes, drawn: Sequence[Drawn]) -> None:
    _draw(ax, drawn, lambda record: record.reward, smooth=True)
    _finish(ax, "Training reward, 10-step means", "mean verifiable score", top=1.02)


def _reward_wall(ax: Axes, drawn: Sequence[Drawn]) -> None:
    """The same against training seconds: the mean curve is mean reward over mean time, step by step."""
    for entry in drawn:
        clocks = [dict(zip((r.step for r in data.steps), seconds_at(data), strict=True)) for data in entry.runs.cut]
        curves = [_smoothed(curve) for curve in _column(entry.runs, lambda record: record.reward)]
        if len(curves) > 1:
            for clock, curve in zip(clocks, curves, strict=True):
                ax.plot([clock[step] for step, _ in curve], [v for _, v in curve], color=entry.colour, **_SEED)
        centre = mean_curve(curves)
        times = [mean(clock[step] for clock in clocks) or 0.0 for step, _ in centre]
        ax.plot(times, [value for _, value in centre], color=entry.colour, **_MEAN)
    seconds = "training seconds without evaluations"
    _finish(ax, "Training reward against time, 10-step means", "mean verifiable score", seconds, top=1.02)


def _entropy(ax: Axes, drawn: Sequence[Drawn]) -> None:
    _draw(ax, drawn, lambda record: record.entropy.compression, codec=True)
    _dashed(ax, drawn, lambda record: record.entropy.dense)
    _finish(ax, "Entropy (compression view)", "nats/token")


def _kl(ax: Axes, drawn: Sequence[Drawn]) -> None:
    _draw(ax, drawn, lambda record: record.kl.compression, codec=True)
    _dashed(ax, drawn, lambda record: record.kl.dense)
    _finish(ax, "KL to the reference (compression view)", "nats/token")


def _mismatch(ax: Axes, drawn: Sequence[Drawn]) -> None:
    _draw(ax, drawn, lambda record: record.mismatch, codec=True)
    _finish(ax, "Train-inference mismatch", "nats/token")


def _grad_norm(ax: Axes, drawn: Sequence[Drawn]) -> None:
    _draw(ax, drawn, lambda record: record.grad_norm or None)
    log_axis(ax, "y", number)
    _finish(ax, "Gradient norm before clipping", "global L2 norm (log)")


def _accuracy(ax: Axes, drawn: Sequence[Drawn]) -> None:
    for entry in drawn:
        curves = [[(e.step, e.accuracy) for e in data.evaluations] for data in entry.runs.cut if data.evaluations]
        if len(curves) > 1:
            for curve in curves:
                ax.plot(*_xy(curve), color=entry.colour, **_SEED)
        ax.plot(*_xy(mean_curve(curves)), "D-", color=entry.colour, markersize=5, **_MEAN)
    _finish(ax, "Greedy accuracy on held-out problems", "share correct", top=1.04)


_PANELS: dict[Panel, Callable[[Axes, Sequence[Drawn]], None]] = {
    "reward": _reward,
    "reward_wall": _reward_wall,
    "entropy": _entropy,
    "kl": _kl,
    "mismatch": _mismatch,
    "grad_norm": _grad_norm,
    "accuracy": _accuracy,
}
