"""Figures about what a step costs: bytes on every wire, changed weights, seconds, staleness.

Each draws one run into given axes and returns the title: the reading, in words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sprawl.report.data import RunData
from sprawl.report.numbers import last_mean, mean, median, ratio
from sprawl.report.series import smoothed, step_numbers
from sprawl.report.style import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, SERIES, label_ends, log_axis, set_labels
from sprawl.report.text import megabytes, number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIRES = (("boundary", "stage boundaries", BLUE), ("delta", "policy versions", GREEN), ("sign", "sign maps", PURPLE))


def wire_ratio(data: RunData, wire: str) -> float | None:
    sent = sum(getattr(record, wire).sent for record in data.steps)
    return ratio(sent, sum(getattr(record, wire).dense for record in data.steps))


def draw_wires(ax: Axes, data: RunData) -> str:
    used = [entry for entry in reversed(WIRES) if wire_ratio(data, entry[0]) is not None]
    widths: list[float] = []
    for row, (wire, _, colour) in enumerate(used):
        sent = sum(getattr(record, wire).sent for record in data.steps) / len(data.steps)
        dense = sum(getattr(record, wire).dense for record in data.steps) / len(data.steps)
        widths += [sent, dense]
        ax.barh(row - 0.17, sent, height=0.3, color=colour)
        ax.barh(row + 0.17, dense, height=0.3, color=colour, alpha=0.25)
        share = f"sent {megabytes(sent)}, {percent(wire_ratio(data, wire))} of dense"
        for offset, value, text in ((-0.17, sent, share), (0.17, dense, f"dense {megabytes(dense)}")):
            ax.annotate(
                text, (value, row + offset), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK
            )
    ax.set_yticks(range(len(used)), [label for _, label, _ in used])
    ax.tick_params(axis="y", labelsize=8.5, length=0)
    ax.grid(False, axis="y")
    lowest, highest = min(width for width in widths if width > 0) / 3, max(widths)
    ax.set_xlim(lowest, highest * (highest / lowest) ** 0.6)  # room for the text behind the longest bar
    log_axis(ax, "x", megabytes)
    set_labels(ax, "", "a step, mean over the run (log)")
    return "; ".join(f"{label} {percent(wire_ratio(data, wire))}" for wire, label, _ in reversed(used)).capitalize()


def draw_bytes(ax: Axes, data: RunData) -> str:
    labels = []
    for wire, label, colour in WIRES:
        points = [(record.step, getattr(record, wire).sent) for record in data.steps if getattr(record, wire).sent > 0]
        if not points:
            continue
        style = "o" if wire == "sign" else "-"
        ax.plot([x for x, _ in points], [y for _, y in points], style, color=colour, markersize=3.5, linewidth=1.4)
        labels.append((points[-1][1], label, colour))
    keyframes = [record for record in data.steps if record.kind == "keyframe"]
    ax.plot([record.step for record in keyframes], [record.delta.sent for record in keyframes], "s", color=GREEN, ms=4)
    if labels:
        log_axis(ax, "y", megabytes)
        label_ends(ax, labels)
    set_labels(ax, "sent in a step (log)")
    total = sum(getattr(record, wire).sent for record in data.steps for wire, _, _ in WIRES)
    return f"{megabytes(total)} sent in {len(data.steps)} steps, {len(keyframes)} keyframes (squares)"


def draw_changed(ax: Axes, data: RunData) -> str:
    values = [100 * record.changed_share for record in data.steps]
    smoothed(ax, step_numbers(data), values, BLUE)
    ax.set_ylim(bottom=0.0)
    set_labels(ax, "% of served weights")
    return f"{number(mean(values))} % of the served weights change in a step"


def draw_seconds(ax: Axes, data: RunData) -> str:
    """Phases stacked, longest at the bottom; the small ones and the rest of the total are one `other`.

    `rollout` is no phase of the step: it is how long sampling the batch took while earlier steps trained.
    """
    names = {name for record in data.steps for name in record.seconds} - {"total", "rollout"}
    means = {name: mean(record.seconds.get(name, 0.0) for record in data.steps) or 0.0 for name in names}
    shown = sorted(names, key=lambda name: -means[name])[: len(SERIES) - 1]
    stacks = [[record.seconds.get(name, 0.0) for record in data.steps] for name in shown]
    totals = [record.seconds.get("total", 0.0) for record in data.steps]
    other = [max(0.0, total - sum(stack[i] for stack in stacks)) for i, total in enumerate(totals)]
    colours = list(SERIES[: len(shown)])
    if sum(other) > 0.01 * sum(totals):
        shown, stacks, colours = [*shown, "other"], [*stacks, other], [*colours, MUTED]
    ax.stackplot(step_numbers(data), stacks, colors=colours, alpha=0.75, linewidth=0)
    middle = median(totals) or 0.0
    sampling = [(record.step, record.seconds["rollout"]) for record in data.steps if "rollout" in record.seconds]
    # Not the highest total: one slow step would flatten all the others.
    ax.set_ylim(0.0, max(1.6 * middle, 1.1 * (median(value for _, value in sampling) or 0.0), 0.01))
    # Labels stand at the middle of their band in the newest steps; bands too thin to see get none.
    labels, base, top = [], 0.0, ax.get_ylim()[1]
    for name, stack, colour in zip(shown, stacks, colours, strict=True):
        height = last_mean(stack) or 0.0
        if max(stack) > 0.05 * top:
            labels.append((min(base + height / 2, top), name.replace("_", " "), colour))
        base += height
    if sampling:
        ax.plot(*zip(*sampling, strict=True), ":", color=INK, linewidth=1.1)
        labels.append((min(sampling[-1][1], top), "sampling,\noverlapped", INK))
    set_labels(ax, "seconds")
    label_ends(ax, labels)
    longest = f"; the longest phase is {shown[0].replace('_', ' ')}" if shown else ""
    return f"{number(middle)} s a step{longest}"


def draw_staleness(ax: Axes, data: RunData) -> str:
    limit = data.setting("rollout.max_staleness")
    highest = [record.staleness_max for record in data.steps]
    values = [record.staleness for record in data.steps]
    ax.plot(step_numbers(data), highest, drawstyle="steps-mid", color=ORANGE, linewidth=1.0, alpha=0.7)
    ax.plot(step_numbers(data), values, color=BLUE, linewidth=1.6)
    labels = [(float(highest[-1]), "oldest", ORANGE), (values[-1], "mean", BLUE)]
    if limit is not None:
        ax.axhline(limit, color=INK, linewidth=0.9, linestyle="--")
        labels.append((float(limit), "limit", INK))
    ax.set_ylim(-0.05, max([*highest, limit or 0]) * 1.15 + 0.1)
    set_labels(ax, "versions behind")
    label_ends(ax, labels)
    return f"Age of rollouts: {number(mean(values))} versions on average, {max(highest)} at most"
