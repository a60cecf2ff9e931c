"""The fleet port: whoever can start and stop the processes of a run. Adapters live in `infra` and register
themselves under the entry-point group `sprawl.fleets`, so that the library does not know where machines come from."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Protocol

from sprawl.config import RunConfig
from sprawl.errors import SprawlError
from sprawl.fleet.port import IslandFleet, Machine


@dataclass(frozen=True)
class FleetContext:
    """What a started process needs to find its run."""

    board: str  # absolute board URL or directory
    run_id: str
    config: RunConfig
    log_dir: Path
    anchor_argv: tuple[str, ...] | None = None  # how to start the anchor; None: `sprawl anchor`
    island_hourly_cost: float | None = None  # dollars; an adapter that rents takes no dearer machine
    job_group: str | None = None  # what islands are attached to, where the platform knows such a thing
    lasting: bool = False  # islands outlive whoever starts them, and end when the fleet's log says so


@dataclass(frozen=True)
class Exit:
    """A process that ended without being asked to."""

    name: str  # island-0, anchor ...
    returncode: int
    log: Path


class Fleet(IslandFleet, Protocol):
    """A run's processes, wherever they run. What scaling needs of it is `IslandFleet`."""

    start_s: float
    """How long the first island may take to become ready."""

    def start_anchor(self) -> None:
        """Start the run's anchor process."""

    def poll(self) -> list[Exit]:
        """Processes that ended unasked since the last call."""

    def stop(self) -> None:
        """Stop everything this fleet started: asks first, kills after a grace period. Idempotent."""


class Unmanaged:
    """Fleet `none`: islands and anchor are started by somebody else, and found on the board."""

    start_s = 3600.0
    settle_s = 0.0

    def start_island(self, island_id: str) -> None:
        pass

    def drain_island(self, island_id: str) -> None:
        pass

    def cancel_island(self, island_id: str) -> None:
        pass

    def machines(self) -> list[Machine]:
        return []

    def start_anchor(self) -> None:
        pass

    def poll(self) -> list[Exit]:
        return []

    def stop(self) -> None:
        pass


def check_fleet(name: str) -> None:
    """Raises SprawlError when there is no fleet of this name."""
    known = {"none", *(entry.name for entry in _installed())}
    if name not in known:
        raise SprawlError(f"no fleet named {name!r} is installed", f"installed: {', '.join(sorted(known))}")


def open_fleet(name: str, context: FleetContext) -> Fleet:
    """The fleet registered under `name`; `none` is `Unmanaged`. Raises SprawlError when there is no such fleet."""
    check_fleet(name)
    found = next((entry for entry in _installed() if entry.name == name), None)
    return Unmanaged() if found is None else found.load()(context)


def _installed() -> EntryPoints:
    return entry_points(group="sprawl.fleets")
