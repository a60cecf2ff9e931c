"""What a fleet of islands can be asked: the part of the fleet port (`sprawl.run.fleet`) that scaling needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Phase = Literal["pending", "starting", "running", "recovering", "ending"]


@dataclass(frozen=True)
class Machine:
    """A machine (process, job) of one island, as whoever runs it tells. Those that have ended are not told of.

    pending: asked for, costs nothing yet. starting: there, the island is not. recovering: was taken, another one is
    looked for. ending: being given back. `since`: Unix seconds at which it was asked for or came to run; None if
    unknown.
    """

    island_id: str
    phase: Phase
    since: float | None = None
    where: str = ""  # cloud, region, process: for people


class IslandFleet(Protocol):
    """Adapters keep nothing in memory that another process could not find out again: a controller may die any time."""

    settle_s: float
    """How long a start that was asked for may take until `machines` tells of it."""

    def start_island(self, island_id: str) -> None:
        """Ask for an island of this name, which will register itself on the board. Starting one that runs is a no-op.
        Raises SprawlError when it cannot be asked for."""

    def drain_island(self, island_id: str) -> None:
        """Let an island finish its requests, leave the board and end. Returns at once; an unknown one is a no-op."""

    def cancel_island(self, island_id: str) -> None:
        """Take an island's machine away. Returns at once; idempotent, an unknown one is a no-op."""

    def machines(self) -> list[Machine]:
        """All machines of this run's islands that have not ended, whoever started them. Raises SprawlError when they
        cannot be asked about."""
