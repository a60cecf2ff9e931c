"""What the drift controller did, read from the step records: one figure, one row for every spell at a level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sprawl.report.data import RunData
from sprawl.report.series import fire_ticks
from sprawl.report.style import BLUE, GREEN, MUTED, VERMILLION, label_ends, set_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Spell:
    """Steps `first` to `last` at one level. lr_scale, sign_strength: the lowest of them; symptoms: what began it."""

    first: int
    last: int
    level: int
    lr_scale: float
    sign_strength: float
    dense_steps: int
    fires: list[int]
    symptoms: list[str]


def spells(data: RunData) -> list[Spell]:
    """In order; empty for a run without the controller."""
    found: list[Spell] = []
    for record in data.steps:
        control = record.control
        if control is None:
            continue
        if not found or found[-1].level != control.level:
            seen = list(control.symptoms.values())
            found.append(Spell(record.step, record.step, control.level, 1.0, 1.0, 0, [], seen))
        before = found[-1]
        asked = [control.fire] if control.fire is not None and control.fire not in before.fires else []
        found[-1] = Spell(
            before.first,
            record.step,
            control.level,
            min(before.lr_scale, control.lr_scale),
            min(before.sign_strength, control.sign_strength),
            before.dense_steps + control.dense,
            [*before.fires, *asked],
            before.symptoms,
        )
    return found


def controlled(data: RunData) -> bool:
    return any(record.control is not None for record in data.steps)


def verdicts(data: RunData) -> list[str]:
    """What the controller ended the run with; the same one again for every attempt to resume it."""
    return list(dict.fromkeys(event.message for event in data.events if event.kind == "verdict"))


def draw_control(ax: Axes, data: RunData) -> str:
    records = [(record.step, record.control) for record in data.steps if record.control is not None]
    steps = [step for step, _ in records]
    levels = [control.level for _, control in records]
    strengths = [control.sign_strength for _, control in records]
    scales = [control.lr_scale for _, control in records]
    ax.fill_between(steps, [level / 4 for level in levels], step="mid", color=VERMILLION, alpha=0.18, linewidth=0)
    ax.plot(steps, strengths, drawstyle="steps-mid", color=BLUE, linewidth=1.4)
    ax.plot(steps, scales, drawstyle="steps-mid", color=GREEN, linewidth=1.8)
    for step, control in records:
        if control.dense:
            ax.axvline(step, ymin=0.93, color=MUTED, linewidth=1.0)
    fire_ticks(ax, data)
    ax.set_ylim(0.0, 1.06)
    set_labels(ax, "share of what is configured")
    label_ends(
        ax,
        [
            (strengths[-1], "weight of\nsign(M)", BLUE),
            (scales[-1], "learning\nrate", GREEN),
            (0.04, "level / 4", VERMILLION),
        ],
    )
    acting = sum(level > 0 for level in levels)
    return f"Drift controller: acted on {acting} of {len(levels)} steps, level {max(levels)} at most"
