"""What a run on a stream of rollouts says about it, and how long its trainer had nothing to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sprawl.report.data import RunData
from sprawl.report.numbers import mean, ratio
from sprawl.report.style import BLUE, GREEN, ORANGE, VERMILLION, label_ends, set_labels
from sprawl.report.text import duration, number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def streamed(data: RunData) -> bool:
    return any(record.feed is not None for record in data.steps)


def stream_numbers(data: RunData) -> dict[str, Any] | None:
    """The summary's `stream`; None for a run that samples step by step."""
    feeds = [record.feed for record in data.steps if record.feed is not None]
    if not feeds:
        return None
    trained, discarded = sum(len(feed.prompts) for feed in feeds), sum(feed.discarded for feed in feeds)
    return {
        "discarded": discarded,
        "discarded_share": ratio(discarded, trained + discarded),
        "failed": sum(feed.failed for feed in feeds),
        "in_flight_mean": mean(feed.in_flight for feed in feeds),
        "ready_mean": mean(feed.ready for feed in feeds),
        "queue_seconds_mean": mean(feed.queue_seconds for feed in feeds),
        "queue_seconds_max": max(feed.queue_seconds_max for feed in feeds),
    }


def idle_seconds(data: RunData) -> float:
    """How long the trainer waited for rollouts, all steps together."""
    return sum(record.seconds.get("rollout_wait", 0.0) for record in data.steps)


def stream_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of the table of key numbers: age of rollouts and idle trainer of any run, the stream of one that has it."""
    rows = [
        (
            "age of rollouts, versions",
            f"{number(summary['staleness_mean'])} on average, {number(summary['staleness_max'])} at most",
        ),
        (
            "trainer waits for rollouts",
            f"{percent(summary['trainer_idle_share'])}, {duration(summary['trainer_idle_seconds'])}",
        ),
    ]
    stream = summary["stream"]
    if stream is not None:
        text = (
            f"{stream['discarded']} groups too old ({percent(stream['discarded_share'])}), "
            f"{number(stream['in_flight_mean'])} in flight, waited {duration(stream['queue_seconds_mean'])}"
        )
        rows.append(("stream", text))
    return rows


def draw_stream(ax: Axes, data: RunData) -> str:
    """Groups in flight, ready and given up at every step, and how long those that were trained had waited."""
    found = [(record.step, record.feed) for record in data.steps if record.feed is not None]
    steps, feeds = [step for step, _ in found], [feed for _, feed in found]
    labels = []
    for name, label, colour in (("in_flight", "in flight", BLUE), ("ready", "ready", GREEN)):
        values = [getattr(feed, name) for feed in feeds]
        ax.plot(steps, values, color=colour, linewidth=1.5, drawstyle="steps-mid")
        labels.append((float(values[-1]), label, colour))
    gone = [(step, feed.discarded) for step, feed in found if feed.discarded]
    if gone:
        ax.vlines([step for step, _ in gone], 0, [count for _, count in gone], color=VERMILLION, linewidth=1.6)
        labels.append((float(gone[-1][1]), "too old", VERMILLION))
    ages = [feed.queue_seconds for feed in feeds]
    ax.plot(steps, ages, ":", color=ORANGE, linewidth=1.3)
    labels.append((ages[-1], "waited, s", ORANGE))
    ax.set_ylim(bottom=0.0)
    set_labels(ax, "groups; seconds")
    label_ends(ax, labels)
    numbers = stream_numbers(data)
    assert numbers is not None, "drawn for runs on a stream only"
    return (
        f"{numbers['discarded']} of {numbers['discarded'] + sum(len(feed.prompts) for feed in feeds)} groups grew too "
        f"old; groups waited {duration(numbers['queue_seconds_mean'])}"
    )
