"""One run, many flow runs: the segments a long run is cut into, and the attempts that follow a crash. Pure.

The board is the truth about a run; a flow run is a stretch of work on it. What is decided here: where a stretch ends,
what the next one is called, and when an automation that starts crashed ones again has to stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ATTEMPT = "attempt"  # kind of the event that every start leaves in the run's ledger


@dataclass(frozen=True)
class Stretch:
    """The optimizer steps of one flow run, from `first` to `last`. `steps`: of the whole run."""

    first: int
    last: int
    steps: int
    segment: int

    @property
    def final(self) -> bool:
        return self.last >= self.steps

    def name(self, run_id: str) -> str:
        """The flow run's name: its run's, and which steps where the run is cut."""
        return run_id if self.steps <= self.segment else f"{run_id} {self.first}-{self.last}"


def stretch(head: int, steps: int, segment: int) -> Stretch:
    """What comes after `head` committed steps. Segments end at multiples of `segment`, wherever one began."""
    if head >= steps:
        return Stretch(steps, steps, steps, segment)
    return Stretch(head + 1, min(steps, (head // segment + 1) * segment), steps, segment)


def run_tag(run_id: str) -> str:
    """The tag that all flow runs of a run carry: filter the UI by it."""
    return f"run:{run_id}"


def tries_without_progress(attempt: int, head: int, before: Sequence[tuple[int, int]]) -> int:
    """How many automatic starts in a row, this one (number `attempt`) included, began at the committed step `head`.

    `before`: number and committed step of earlier starts, oldest first, from the ledger. A start that was killed before
    it could write itself down is missing there and counts all the same, because numbers go up by one. A person's start
    is number 0 and begins a new row.
    """
    later = attempt
    for number, began_at in reversed(before):
        if number >= later:
            break
        if began_at < head:
            return attempt - number
        later = number
    return attempt


def pause_before(tries: int) -> float:
    """Seconds to wait before a start that may be futile: whatever is down gets eight minutes in all to come back."""
    return 0.0 if tries < 2 else min(240.0, 15.0 * 2 ** (tries - 2))


def next_parameters(parameters: Mapping[str, Any], run_id: str, board: str) -> dict[str, Any]:
    """Parameters of the flow run that does the next segment."""
    kept = {name: parameters[name] for name in ("config", "fleet", "segment") if name in parameters}
    return {**kept, "resume": run_id, "board": board}


@dataclass(frozen=True)
class Link:
    """One flow run of a run, as the chain shows it. `attempt`: 0 when a person or a segment before it started it."""

    name: str
    url: str
    state: str
    attempt: int
    started: str


def chain_markdown(run_id: str, links: Sequence[Link]) -> str:
    """All flow runs of a run, oldest first: who came after whom, and why."""
    rows = [
        f"| {number} | [{link.name}]({link.url}) | {link.started} | {_why(number, link)} | {link.state} |"
        for number, link in enumerate(links, start=1)
    ]
    head = ["| | flow run | started (UTC) | because | state |", "|---|---|---|---|---|"]
    return "\n".join([f"### Flow runs of {run_id}", "", *head, *rows, ""])


def _why(number: int, link: Link) -> str:
    if link.attempt:
        return f"the one before crashed (attempt {link.attempt})"
    return "first" if number == 1 else "next segment, or resumed by hand"
