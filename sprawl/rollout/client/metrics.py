"""What a client counts, and how it is shown: as a dictionary for records, as Prometheus text for scrapers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from sprawl.exposition import Labels, Page

Failure = Literal["reset", "unavailable", "behind", "passed", "lie", "lost", "deadline"]
"""Why an attempt failed: connection broken; 5xx; 409 retryable; 409 for good; an answer that breaks its promise;
heartbeat stopped; no time left."""


@dataclass
class ClientMetrics:
    """Totals since the client was opened; `in_flight` and `waiting` are what is so now."""

    groups: int = 0  # answered
    failed_groups: int = 0  # given up: deadline, refused, passed everywhere
    cancelled_groups: int = 0
    attempts: int = 0
    failures: Counter[Failure] = field(default_factory=Counter)
    hedges: int = 0
    hedges_won: int = 0
    hedges_skipped: int = 0  # a straggler, but no island was free or the budget was spent
    losers_cancelled: int = 0
    continuations: int = 0  # attempts that went on where a lost island stopped
    continued_tokens: int = 0  # tokens of answers that were taken over instead of being sampled again
    islands_lost: int = 0
    islands_slowed: int = 0  # back-pressure: windows halved
    answer_seconds: float = 0.0  # of winning attempts
    queue_seconds: float = 0.0  # waiting for a place on an island
    in_flight: int = 0
    waiting: int = 0
    answers_by_island: Counter[str] = field(default_factory=Counter)

    def snapshot(self) -> dict[str, float]:
        """Every number by name; failures as `failures_<reason>`."""
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, (int, float))}
        return {**numbers, **{f"failures_{reason}": count for reason, count in sorted(self.failures.items())}}

    def render(self) -> str:
        """Prometheus text format; names start with `sprawl_client_`, counters end in `_total`."""
        page = Page("sprawl_client_")
        for name, value in vars(self).items():
            if isinstance(value, Counter):
                label = "reason" if name == "failures" else "island"
                rows: dict[Labels, float] = {((label, key),): count for key, count in sorted(value.items())}
                page.add(f"{name}_total", "counter", "", rows)
            elif name in ("in_flight", "waiting"):
                page.add(name, "gauge", "", value)
            else:
                page.add(f"{name}_total", "counter", "", value)
        return page.text()
