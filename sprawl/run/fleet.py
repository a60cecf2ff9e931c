"""The fleet port: whoever can start and stop the processes of a run. Adapters live in `infra` and register
themselves under the entry-point group `sprawl.fleets`, so that the library does not know where machines come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sprawl.config import RunConfig
from sprawl.errors import SprawlError


@dataclass(frozen=True)
class FleetContext:
    """What a started process needs to find its run."""

    board: str  # absolute board URL or directory
    run_id: str
    config: RunConfig
    log_dir: Path
    anchor_argv: tuple[str, ...] | None = None  # how to start the anchor; None: `sprawl anchor`


@dataclass(frozen=True)
class Exit:
    """A process that ended without being asked to."""

    name: str  # island-0, anchor ...
    returncode: int
    log: Path


class Fleet(Protocol):
    def start_island(self, island_id: str) -> None:
        """Start an island that will register itself on the board. Starting one that runs is a no-op."""

    def start_anchor(self) -> None:
        """Start the run's anchor process."""

    def poll(self) -> list[Exit]:
        """Processes that ended unasked since the last call."""

    def stop(self) -> None:
        """Stop everything this fleet started: asks first, kills after a grace period. Idempotent."""


def open_fleet(name: str, context: FleetContext) -> Fleet:
    """The fleet registered under `name`. Raises SprawlError when there is none."""
    from importlib.metadata import entry_points

    for entry in entry_points(group="sprawl.fleets"):
        if entry.name == name:
            return entry.load()(context)
    known = ", ".join(sorted(entry.name for entry in entry_points(group="sprawl.fleets"))) or "none"
    raise SprawlError(f"no fleet named {name!r} is installed", f"installed: {known}")
