"""What an island counts from its start on, for /metrics."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass
class Histogram:
    """Counts by upper bound in seconds; the last count is of what exceeds all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds


@dataclass
class Counters:
    """`requests` is by route and status, `seconds` by route: until the answer, or the first token of a stream."""

    requests: dict[tuple[str, int], int] = field(default_factory=dict)
    seconds: dict[str, Histogram] = field(default_factory=dict)
    waits: Histogram = field(default_factory=Histogram)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cancelled: int = 0
    turned_away: int = 0
    engine_errors: int = 0

    def count(self, route: str, status: int, seconds: float) -> None:
        self.requests[route, status] = self.requests.get((route, status), 0) + 1
        self.seconds.setdefault(route, Histogram()).observe(seconds)


@dataclass
class Connections:
    """Of the HTTP server."""

    open: int = 0
    refused: int = 0
    dropped: int = 0
