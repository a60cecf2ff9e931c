"""Figures about learning: reward, the two views of entropy and KL, mismatch, gradient norm, sign agreement.

Each draws one run into given axes and returns the title: the reading, in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from sprawl.board.records import StepRecord, Views
from sprawl.report.data import RunData
from sprawl.report.numbers import finite, first_mean, last_mean, line_fit, mean, median, wilson
from sprawl.report.series import compressed, fire_ticks, probed, smoothed, step_numbers
from sprawl.report.style import BLUE, GREEN, INK, MUTED, VERMILLION, label_ends, log_axis, set_labels
from sprawl.report.text import number, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_reward(ax: Axes, data: RunData) -> str:
    values = [record.reward for record in data.steps]
    labels = [(smoothed(ax, step_numbers(data), values, BLUE), "reward", BLUE)]
    fire_ticks(ax, data)
    if data.fires:
        ax.text(
            data.fires[0].step, 0.065, " anchor fires", transform=ax.get_xaxis_transform(), fontsize=7.5, color=MUTED
        )
    title = f"Reward {number(first_mean(values))} → {number(last_mean(values))}"
    if data.evaluations:
        for record in data.evaluations:
            ax.plot([record.step] * 2, wilson(record.correct, record.problems), color=GREEN, linewidth=1.0, alpha=0.5)
        steps = [record.step for record in data.evaluations]
        accuracies = [record.accuracy for record in data.evaluations]
        ax.plot(steps, accuracies, "D", color=GREEN, markersize=5)
        labels.append((accuracies[-1], "greedy\naccuracy", GREEN))
        title += f"; greedy accuracy {number(accuracies[-1])}"
    ax.set_ylim(-0.02, 1.04)
    set_labels(ax, "score, 0 to 1")
    label_ends(ax, labels)
    return title


def _draw_views(ax: Axes, data: RunData, name: str, of: Callable[[StepRecord], Views], log: bool = False) -> str:
    compression, dense = [of(record).compression for record in data.codec_steps], [of(r).dense for r in data.steps]
    label = "through\nthe codec" if compressed(data) else "policy"
    title = f"{name} {number(first_mean(compression))} → {number(last_mean(compression))}"
    last = smoothed(ax, [record.step for record in data.codec_steps], compression, BLUE)
    labels = [(last, label, BLUE)]
    steps, points = probed(data, dense)
    if points and compressed(data):
        ax.plot(steps, points, "o-", color=VERMILLION, markersize=3, linewidth=1.4)
        labels.append((points[-1], "dense view\n(probe)", VERMILLION))
        title += f" through the codec, {number(first_mean(dense))} → {number(last_mean(dense))} dense"
    if log and any(value > 0 for value in (*compression, *points)):
        log_axis(ax, "y", number)
        labels = [entry for entry in labels if entry[0] > 0]
    else:
        ax.set_ylim(bottom=min(0.0, *finite(compression), *points))
    label_ends(ax, labels)
    return title


def draw_entropy(ax: Axes, data: RunData) -> str:
    set_labels(ax, "nats/token")
    return _draw_views(ax, data, "Entropy", lambda record: record.entropy)


def draw_kl(ax: Axes, data: RunData) -> str:
    set_labels(ax, "nats/token (log)")
    return _draw_views(ax, data, "KL to the base", lambda record: record.kl, log=True)


def draw_mismatch(ax: Axes, data: RunData) -> str:
    numbers, values = [r.step for r in data.codec_steps], [r.mismatch for r in data.codec_steps]
    last = smoothed(ax, numbers, values, BLUE)
    labels = [(last, "through\nthe codec" if compressed(data) else "policy", BLUE)]
    steps, dense = probed(data, [record.mismatch_dense for record in data.steps])
    if dense and compressed(data):
        ax.plot(steps, dense, "o", color=VERMILLION, markersize=3)
        labels.append((dense[-1], "dense view\n(probe)", VERMILLION))
    fit = line_fit(numbers, values)
    title = f"Mismatch {number(last_mean(values))} nats/token"
    if fit:
        slope, intercept = fit
        ends = [data.steps[0].step, data.last_step]
        ax.plot(ends, [intercept + slope * x for x in ends], "--", color=INK, linewidth=1.0)
        title += f", slope {signed(slope)} a step"
    ax.set_ylim(0.0, max(finite(values), default=0.0) * 1.15 or 1.0)
    set_labels(ax, "nats/token")
    label_ends(ax, labels)
    return title


def draw_grad_norm(ax: Axes, data: RunData) -> str:
    pairs = [(record.step, record.grad_norm) for record in data.steps if 0 < record.grad_norm < math.inf]
    refused = [record.step for record in data.steps if not record.applied]
    middle = median(value for _, value in pairs)
    for step in refused:
        ax.axvline(step, color=VERMILLION, linewidth=1.0)
    if middle:
        smoothed(ax, [step for step, _ in pairs], [value for _, value in pairs], BLUE)
        ax.axhline(middle, color=INK, linewidth=0.9, linestyle="--")
        log_axis(ax, "y", number)
        label_ends(ax, [(middle, "median", INK)])
    set_labels(ax, "global L2 norm before clipping (log)")
    return f"Gradient norm, median {number(middle)}" + (f"; steps refused: {len(refused)}" if refused else "")


def draw_sign(ax: Axes, data: RunData) -> str:
    steps, values = probed(data, [record.sign_agreement for record in data.steps])
    shares = [100 * value for value in values]
    ax.plot(steps, shares, ".-", color=BLUE, markersize=4, linewidth=1.2)
    ax.axhline(50.0, color=INK, linewidth=0.9, linestyle="--")
    fire_ticks(ax, data)
    low, high = min([*shares, 50.0]), max([*shares, 50.0])
    margin = max(1.0, 0.15 * (high - low))
    ax.set_ylim(low - margin, high + margin)
    set_labels(ax, "% of non-zero gradient elements")
    label_ends(ax, [(shares[-1], "agrees\nwith M", BLUE), (50.0, "chance", INK)])
    return f"Sign agreement with M {number(mean(shares))} % on average (chance: 50 %)"
