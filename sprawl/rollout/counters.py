"""What an island counts from its start on, for /metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from sprawl.exposition import Histogram


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
