"""Several runs laid side by side: labels from what differs in their configs, one figure, one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sprawl.errors import SprawlError, file_failure
from sprawl.report.data import RunData
from sprawl.report.numbers import finite, rolling_mean
from sprawl.report.series import probed, smooth_window
from sprawl.report.style import SERIES, figure_bytes, label_ends, log_axis, new_figure, set_labels, set_title
from sprawl.report.summary import summarise_data
from sprawl.report.text import DASH, megabytes, number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOT_A_DIFFERENCE = {"name", "board", "steps"}
_COLUMNS = (
    "run_id",
    "finished",
    "steps",
    "reward_first10",
    "reward_last20",
    "greedy_accuracy",
    "mismatch_first",
    "mismatch_last",
    "mismatch_slope",
    "grad_norm_median",
    "seconds_per_step",
    "boundary_bytes_ratio",
    "delta_bytes_ratio",
    "changed_share_mean",
    "fires",
    "violations",
)
_HEADS = (
    "run",
    "steps",
    "mean reward, first 10 → last 20",
    "greedy accuracy, first → last",
    "mismatch, nats/token",
    "entropy, codec / dense, nats/token",
    "gradient norm, median",
    "s/step",
    "boundary bytes / dense",
    "version bytes / whole",
    "violations",
)


@dataclass(frozen=True)
class ComparisonPaths:
    png: Path
    markdown: Path
    json: Path


def label_runs(runs: Sequence[RunData]) -> list[str]:
    """`dense`, `prf + anchor`, `prf, no anchor` ...; runs that read alike get what else differs, at last the run id."""
    labels = [_circuit(data) for data in runs]
    configs = [_flat(data.run.config) for data in runs]
    result = []
    for i, label in enumerate(labels):
        alike = [configs[j] for j in range(len(runs)) if labels[j] == label]
        differing = sorted(
            {key for config in alike for key in config if len({repr(other.get(key)) for other in alike}) > 1}
            - _NOT_A_DIFFERENCE
        )
        extras = [f"{key.rpartition('.')[2]}={configs[i].get(key)}" for key in differing[:2]]
        result.append(", ".join([label, *extras]))
    return [
        label if result.count(label) == 1 else f"{label} ({data.run.run_id})"
        for label, data in zip(result, runs, strict=True)
    ]


def _circuit(data: RunData) -> str:
    codec, anchored = data.setting("boundary.codec", "?"), data.setting("anchor.enabled", False)
    if codec == "dense":
        return "dense + anchor" if anchored else "dense"
    return f"{codec} + anchor" if anchored else f"{codec}, no anchor"


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def comparison_rows(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """One JSON row a run: its label and the numbers that tell the runs apart."""
    rows = []
    for label, data in zip(label_runs(runs), runs, strict=True):
        summary = summarise_data(data)
        row = {"label": label} | {key: summary[key] for key in _COLUMNS}
        row["greedy_accuracy_first"] = data.evaluations[0].accuracy if data.evaluations else None
        row["entropy_compression_last"] = summary["entropy"]["compression"]["last"]
        row["entropy_dense_last"] = summary["entropy"]["dense"]["last"]
        rows.append(row)
    return rows


def comparison_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a markdown table; units in the heads."""
    lines = ["| " + " | ".join(_HEADS) + " |", "|" + "---|" * len(_HEADS)]
    for row in rows:
        entropy = f"{number(row['entropy_compression_last'])} / {number(row['entropy_dense_last'])}"
        cells = (
            row["label"],
            str(row["steps"]) + ("" if row["finished"] else " (unfinished)"),
            f"{number(row['reward_first10'])} → {number(row['reward_last20'])}",
            f"{number(row['greedy_accuracy_first'])} → {number(row['greedy_accuracy'])}",
            number(row["mismatch_last"]),
            entropy,
            number(row["grad_norm_median"]),
            number(row["seconds_per_step"]),
            percent(row["boundary_bytes_ratio"]),
            percent(row["delta_bytes_ratio"]),
            str(len(row["violations"])),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def compare_figure(runs: Sequence[RunData]) -> Figure:
    """Reward, greedy accuracy, mismatch, entropy in both views, gradient norm and boundary bytes, a colour a run.

    Raises SprawlError when no run has a step yet.
    """
    if not any(data.steps for data in runs):
        raise SprawlError("none of the runs to compare has an optimizer step yet", "let one train first")
    named = [
        (label, data, SERIES[i % len(SERIES)])
        for i, (label, data) in enumerate(zip(label_runs(runs), runs, strict=True))
        if data.steps
    ]
    figure, axes = new_figure(2, 3, (14.5, 7.0))
    for ax, draw in zip(axes, (_reward, _accuracy, _mismatch, _entropy, _grad_norm, _boundary), strict=True):
        draw(ax, named)
    return figure


Named = Sequence[tuple[str, RunData, str]]


def _curves(ax: Axes, named: Named, column: str, title: str, unit: str) -> None:
    """Moving means of one StepRecord column over its faint raw points."""
    labels = []
    for label, data, colour in named:
        records = data.codec_steps if column == "mismatch" else data.steps
        numbers, values = [record.step for record in records], [getattr(record, column) for record in records]
        window = smooth_window(len(values))
        means = rolling_mean(values, window)
        ax.plot(numbers, values, ".", color=colour, alpha=0.25, markersize=4, markeredgewidth=0)
        ax.plot(numbers[window - 1 :], means, color=colour, linewidth=1.8)
        labels.append((means[-1], label, colour))
    set_title(ax, title)
    set_labels(ax, unit)
    if column == "grad_norm":
        log_axis(ax, "y", number)
        labels = [entry for entry in labels if entry[0] > 0]
    else:
        ax.set_ylim(bottom=0.0)
    label_ends(ax, labels)


def _reward(ax: Axes, named: Named) -> None:
    _curves(ax, named, "reward", "Reward, 10-step means", "score, 0 to 1")


def _mismatch(ax: Axes, named: Named) -> None:
    _curves(ax, named, "mismatch", "Sampler-to-trainer mismatch", "nats/token")


def _grad_norm(ax: Axes, named: Named) -> None:
    _curves(ax, named, "grad_norm", "Gradient norm before clipping", "global L2 norm (log)")


def _accuracy(ax: Axes, named: Named) -> None:
    labels = []
    for label, data, colour in named:
        if data.evaluations:
            accuracies = [record.accuracy for record in data.evaluations]
            ax.plot([record.step for record in data.evaluations], accuracies, "D-", color=colour, ms=5, linewidth=1.4)
            labels.append((accuracies[-1], label, colour))
    ax.set_ylim(-0.02, 1.04)
    set_title(ax, "Greedy accuracy on held-out problems" if labels else "Greedy accuracy: not evaluated yet")
    set_labels(ax, "share correct")
    label_ends(ax, labels)


def _entropy(ax: Axes, named: Named) -> None:
    labels = []
    for label, data, colour in named:
        values = [record.entropy.compression for record in data.codec_steps]
        window = smooth_window(len(values))
        means = rolling_mean(values, window)
        ax.plot([record.step for record in data.codec_steps][window - 1 :], means, color=colour, linewidth=1.8)
        steps, dense = probed(data, [record.entropy.dense for record in data.steps])
        ax.plot(steps, dense, "--", color=colour, linewidth=1.2)
        labels.append((means[-1], label, colour))
    ax.set_ylim(bottom=0.0)
    set_title(ax, "Entropy; dashed: dense view")
    set_labels(ax, "nats/token")
    label_ends(ax, labels)


def _boundary(ax: Axes, named: Named) -> None:
    """Mean bytes a step over all stage boundaries: what the codec is for."""
    sent = [sum(record.boundary.sent for record in data.steps) / len(data.steps) for _, data, _ in named]
    for row, ((_, data, colour), value) in enumerate(zip(named, sent, strict=True)):
        ax.barh(row, value, height=0.55, color=colour)
        share = summarise_data(data)["boundary_bytes_ratio"]
        text = f"{megabytes(value)}, {percent(share)} of dense" if share is not None else DASH
        ax.annotate(text, (value, row), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    ax.set_yticks(range(len(named)), [label for label, _, _ in named])
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set_xlim(0, (max(finite(sent)) or 1.0) * 1.75)  # room for the text behind the longest bar
    ax.set_xticks([])
    set_title(ax, "Bytes over the stage boundaries in a step")


def write_comparison(runs: Sequence[RunData], out: Path, name: str = "comparison") -> ComparisonPaths:
    """Write <name>.png, <name>.md and <name>.json under `out` (created; files are replaced)."""
    rows, figure = comparison_rows(runs), compare_figure(runs)
    paths = ComparisonPaths(out / f"{name}.png", out / f"{name}.md", out / f"{name}.json")
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths.png.write_bytes(figure_bytes(figure))
        paths.markdown.write_text(comparison_markdown(rows), encoding="utf-8")
        paths.json.write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise file_failure("write the comparison under", out, error) from None
    return paths
