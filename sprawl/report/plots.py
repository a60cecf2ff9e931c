"""The figures of one run: `FIGURES` lists them with captions that say what healthy looks like.

`available(data)` leaves out those the run has no data for. Colours mean the same everywhere, see
`sprawl.report.style`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sprawl.report.control import controlled, draw_control
from sprawl.report.data import RunData
from sprawl.report.learning import draw_entropy, draw_grad_norm, draw_kl, draw_mismatch, draw_reward, draw_sign
from sprawl.report.stream import draw_stream, streamed
from sprawl.report.style import new_figure, set_title
from sprawl.report.traffic import (
    WIRES,
    draw_bytes,
    draw_changed,
    draw_seconds,
    draw_staleness,
    draw_wires,
    wire_ratio,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FigureSpec:
    name: str  # file name stem
    caption: str  # what healthy looks like
    draw: Callable[[Axes, RunData], str]
    needs: Callable[[RunData], bool] = lambda data: bool(data.steps)

    def figure(self, data: RunData) -> Figure:
        figure, (ax,) = new_figure()
        set_title(ax, self.draw(ax, data))
        return figure


FIGURES = (
    FigureSpec(
        "reward",
        "Healthy: the moving mean rises and greedy accuracy (diamonds, 95 % interval) rises with it. Under compression "
        "expect little before the first anchor fire (ticks).",
        draw_reward,
    ),
    FigureSpec(
        "mismatch",
        "Healthy: flat, however high. The level is what the codec costs; a slope means that sampler and trainer drift "
        "apart.",
        draw_mismatch,
    ),
    FigureSpec(
        "entropy",
        "Healthy: the dense view falls slowly and stays above zero; the view through the codec hardly moves.",
        draw_entropy,
    ),
    FigureSpec(
        "kl",
        "Healthy: the dense view is the real drift from the base and stays small. The view through the codec "
        "carries the codec's noise and is not drift.",
        draw_kl,
    ),
    FigureSpec(
        "grad_norm",
        "Healthy: a flat band. Compression inflates the level; growth over the run is the warning.",
        draw_grad_norm,
    ),
    FigureSpec(
        "sign_agreement",
        "Healthy: at or above chance, highest just after a fire. Well below it M points away from the gradient.",
        draw_sign,
        lambda data: any(record.sign_agreement is not None for record in data.steps),
    ),
    FigureSpec(
        "control",
        "Healthy: no shading, both lines at 1. Shaded: the controller's level. Ticks below: fires, those in between "
        "brought forward; above: dense steps.",
        draw_control,
        controlled,
    ),
    FigureSpec(
        "wires",
        "Solid: bytes really sent. Pale: what dense would have cost on the same wire.",
        draw_wires,
        lambda data: any(wire_ratio(data, wire) is not None for wire, _, _ in WIRES),
    ),
    FigureSpec("bytes", "Healthy: level lines; keyframes are the regular peaks of the version wire.", draw_bytes),
    FigureSpec(
        "changed_share",
        "Healthy: steady. It follows learning rate / weight magnitude, and sets the size of the deltas.",
        draw_changed,
    ),
    FigureSpec(
        "seconds",
        "Healthy: a level stack. A growing rollout wait means that the islands do not keep up; dotted: how "
        "long sampling took beside training.",
        draw_seconds,
    ),
    FigureSpec("staleness", "Healthy: never above the limit.", draw_staleness),
    FigureSpec(
        "stream",
        "Healthy: few groups grow too old, and those that are trained waited briefly. Many too old: lower "
        "rollout.in_flight or raise rollout.max_staleness. Nothing ready: the trainer waits for the islands.",
        draw_stream,
        streamed,
    ),
)


def available(data: RunData) -> list[FigureSpec]:
    """The figures this run has data for; none before its first step."""
    return [spec for spec in FIGURES if data.steps and spec.needs(data)]
