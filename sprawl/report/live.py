"""The page of a run while it trains, as markdown: what is wrong, the key numbers, six charts. For places that render
markdown and load nothing, so the charts are SVG data URIs. Cheap enough to be drawn every few seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sprawl.board.records import PromotionRecord, StepRecord, Views
from sprawl.report.data import RunData
from sprawl.report.health import Finding
from sprawl.report.numbers import first_mean, last_mean, mean, rolling_mean
from sprawl.report.series import compressed, smooth_window
from sprawl.report.stream import stream_rows
from sprawl.report.style import BLUE, GREEN, PURPLE, VERMILLION
from sprawl.report.summary import summarise_data
from sprawl.report.svg import Series, chart, data_uri
from sprawl.report.text import duration, megabytes, moment, number, percent

MAX_BYTES = 200_000
MAX_LISTED = 10


def live_markdown(
    data: RunData,
    findings: Sequence[Finding] = (),
    promotions: Sequence[PromotionRecord] = (),
    *,
    max_bytes: int = MAX_BYTES,
) -> str:
    """The page, at most `max_bytes` long as UTF-8: charts that do not fit are left out, the last ones first."""
    summary = summarise_data(data)
    lines = [f"# {data.run.run_id}", "", _standing(data, summary), ""]
    lines += _attention([finding.message for finding in findings] or summary["violations"])
    lines += key_number_table(summary)
    lines += _decisions(promotions)
    if data.since > 1:
        lines += ["", f"Steps before {data.since} are left out here; `sprawl report {data.run.run_id}` has them."]
    pictures: list[str] = []
    left = max_bytes - sum(len(line.encode()) + 1 for line in lines) - 40
    for name, draw in CHARTS if data.steps else ():
        picture = f"![{name}]({data_uri(draw(data))})"
        left -= len(picture) + 6
        if left < 0:
            break
        pictures.append(picture)
    if pictures:
        lines += ["", *_side_by_side(pictures)]
    return "\n".join(lines) + "\n"


def key_number_table(summary: Mapping[str, Any]) -> list[str]:
    """Lines of a markdown table: two numbers a line."""
    entropy, kl = summary["entropy"], summary["kl"]
    rows = [
        ("reward", f"{number(summary['reward_first10'])} → {number(summary['reward_last20'])}"),
        ("greedy accuracy", number(summary["greedy_accuracy"])),
        ("mismatch, nats/token", f"{number(summary['mismatch_first'])} → {number(summary['mismatch_last'])}"),
        ("gradient norm, median", number(summary["grad_norm_median"])),
        ("entropy, codec", f"{number(entropy['compression']['first'])} → {number(entropy['compression']['last'])}"),
        ("entropy, dense", f"{number(entropy['dense']['first'])} → {number(entropy['dense']['last'])}"),
        ("KL to base, codec", number(kl["compression"]["last"])),
        ("KL to base, dense", number(kl["dense"]["last"])),
        ("boundary bytes / dense", percent(summary["boundary_bytes_ratio"])),
        ("version bytes / whole", percent(summary["delta_bytes_ratio"])),
        ("weights changed a step", percent(summary["changed_share_mean"])),
        ("anchor fires", str(summary["fires"])),
        *stream_rows(summary),
        ("islands", str(summary["islands"])),
        ("time a step", duration(summary["seconds_per_step"])),
        ("resumed", f"{summary['resumed']} times"),
    ]
    if len(rows) % 2:
        rows.append(("", ""))
    lines = ["| | | | |", "|---|---|---|---|"]
    for (name, value), (other, text) in zip(rows[::2], rows[1::2], strict=True):
        lines.append(f"| {name} | **{value}** | {other} | **{text}** |")
    return lines


def _standing(data: RunData, summary: Mapping[str, Any]) -> str:
    planned = summary["steps_planned"]
    text = f"step **{summary['steps']}**" + (f" of {planned}" if planned else "")
    pace = summary["seconds_per_step"]
    if summary["finished"]:
        # Not the newest result: an evaluation may be entered days later.
        return f"{text}, finished {moment(max(event.at for event in data.events if event.kind == 'finish'))}"
    if planned and pace and planned > summary["steps"]:
        text += f", about {duration((planned - summary['steps']) * pace)} left"
    return f"{text}, as of {moment(data.last_result())}"


def _attention(messages: Sequence[str]) -> list[str]:
    if not messages:
        return []
    rest = len(messages) - MAX_LISTED
    more = [f"- and {rest} more"] if rest > 0 else []
    return ["**Needs attention**", "", *(f"- {message}" for message in messages[:MAX_LISTED]), *more, ""]


def _side_by_side(pictures: Sequence[str]) -> list[str]:
    """Two to a line. A table, because a picture in a paragraph has a line of its own in Prefect's UI."""
    pairs = [pictures[at : at + 2] for at in range(0, len(pictures), 2)]
    return ["| | |", "|---|---|", *(f"| {' | '.join((*pair, '')[:2])} |" for pair in pairs)]


def _decisions(promotions: Sequence[PromotionRecord]) -> list[str]:
    if not promotions:
        return []
    lines = ["", "**Decisions about versions**", ""]
    for record in promotions[-MAX_LISTED:]:
        verdict = "promoted" if record.approved else "rejected"
        reason = f": {record.reason}" if record.reason else ""
        lines.append(f"- version {record.version} {verdict} by {record.by}, {moment(record.at)}{reason}")
    return lines


# ---------------------------------------------------------------- charts


def _points(data: RunData, value: Callable[[StepRecord], float | None]) -> list[tuple[int, float]]:
    return [(record.step, found) for record in data.steps if (found := value(record)) is not None]


def _smooth(label: str, colour: str, points: Sequence[tuple[int, float]]) -> list[Series]:
    """Faint raw values and their moving mean, which carries the name."""
    window = smooth_window(len(points))
    means = rolling_mean([y for _, y in points], window)
    ends = [x for x, _ in points[window - 1 :]]
    return [Series("", colour, points, "dots"), Series(label, colour, list(zip(ends, means, strict=True)))]


def _change(values: Iterable[float | None]) -> str:
    column = list(values)
    return f"{number(first_mean(column))} → {number(last_mean(column))}"


def _reward(data: RunData) -> str:
    accuracy = [(record.step, record.accuracy) for record in data.evaluations if record.step >= data.since - 1]
    series = [*_smooth("reward", BLUE, _points(data, lambda record: record.reward))]
    title = f"Reward {_change(record.reward for record in data.steps)}"
    if accuracy:
        series.append(Series("greedy", GREEN, accuracy, "marks"))
        title += f", greedy accuracy {number(accuracy[-1][1])}"
    return chart(title, series, ceiling=1.0)


def _views(data: RunData, name: str, of: Callable[[StepRecord], Views], log: bool = False) -> str:
    codec = [(record.step, of(record).compression) for record in data.codec_steps]
    series = _smooth("codec" if compressed(data) else "policy", BLUE, codec)
    title = f"{name} {_change(value for _, value in codec)}"
    dense = _points(data, lambda record: of(record).dense)
    if dense and compressed(data):
        series += [Series("dense (probe)", VERMILLION, dense)]
        title += f", dense {_change(of(record).dense for record in data.steps)}"
    return chart(title, series, log=log)


def _mismatch(data: RunData) -> str:
    codec = [(record.step, record.mismatch) for record in data.codec_steps]
    series = _smooth("codec" if compressed(data) else "policy", BLUE, codec)
    dense = _points(data, lambda record: record.mismatch_dense)
    if dense and compressed(data):
        series.append(Series("dense (probe)", VERMILLION, dense))
    return chart(f"Mismatch {_change(value for _, value in codec)} nats/token", series)


def _bytes(data: RunData) -> str:
    wires = (("boundaries", BLUE, "boundary"), ("versions", GREEN, "delta"), ("sign maps", PURPLE, "sign"))
    series = [
        Series(label, colour, points, "marks" if wire == "sign" else "line")
        for label, colour, wire in wires
        if (points := [(record.step, float(getattr(record, wire).sent)) for record in data.steps])
        and any(y > 0 for _, y in points)
    ]
    sent = sum(getattr(record, wire).sent for record in data.steps for _, _, wire in wires)
    return chart(f"Bytes sent a step, {megabytes(sent / len(data.steps))} in all", series, log=True, text=megabytes)


def _sparsity(data: RunData) -> str:
    changed = _points(data, lambda record: 100 * record.changed_share)
    patches = [record for record in data.steps if record.kind == "delta" and record.delta.dense]
    sizes = [(record.step, 100 * record.delta.sent / record.delta.dense) for record in patches]
    series = [*_smooth("changed", BLUE, changed), Series("delta bytes", GREEN, sizes)]
    title = f"{number(mean(y for _, y in changed))} % of weights change, deltas {number(mean(y for _, y in sizes))} %"
    return chart(title, [entry for entry in series if entry.points], text=lambda value: f"{number(value)} %")


CHARTS: tuple[tuple[str, Callable[[RunData], str]], ...] = (
    ("reward", _reward),
    ("mismatch", _mismatch),
    ("entropy", lambda data: _views(data, "Entropy", lambda record: record.entropy)),
    ("KL to the base", lambda data: _views(data, "KL", lambda record: record.kl, log=True)),
    ("bytes", _bytes),
    ("sparsity", _sparsity),
)
