"""The Prometheus text format, written by hand: where trainer, islands, client and mirror render what they count."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

Labels = tuple[tuple[str, str], ...]

SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass
class Histogram:
    """Counts by upper bound in seconds; the last count is of what exceeds all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds


class Page:
    """Metrics in the order in which they are added. Names start with `prefix`; seconds and counts in base units."""

    def __init__(self, prefix: str = "sprawl_") -> None:
        self._prefix = prefix
        self._lines: list[str] = []

    def add(self, name: str, kind: str, help_text: str, values: Mapping[Labels, float] | float | None) -> None:
        """One metric; nothing when there is no value."""
        if values is None:
            return
        self._head(name, kind, help_text)
        for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
            self._row(name, labels, value)

    def histogram(self, name: str, help_text: str, values: Mapping[Labels, Histogram]) -> None:
        self._head(name, "histogram", help_text)
        bounds = [*map(repr, SECONDS), "+Inf"]
        for labels, histogram in values.items():
            for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
                self._row(f"{name}_bucket", (*labels, ("le", bound)), count)
            self._row(f"{name}_sum", labels, histogram.total)
            self._row(f"{name}_count", labels, sum(histogram.counts))

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, kind: str, help_text: str) -> None:
        if help_text:
            self._lines.append(f"# HELP {self._prefix}{name} {help_text}")
        self._lines.append(f"# TYPE {self._prefix}{name} {kind}")

    def _row(self, name: str, labels: Labels, value: float) -> None:
        self._lines.append(f"{self._prefix}{name}{_braces(labels)} {_number(value)}")


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
