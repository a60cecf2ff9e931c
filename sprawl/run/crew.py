"""The processes of a run: started through the fleet port, watched, started again when they die."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from sprawl.board.ledger import Ledger, is_live
from sprawl.errors import SprawlError
from sprawl.run.fleet import Fleet

log = logging.getLogger(__name__)

POLL_S = 0.05
ANCHOR = "anchor"


class Crew:
    """Islands and anchor of one run. `report(kind, message)` writes an event to the ledger."""

    def __init__(self, fleet: Fleet, ledger: Ledger, log_dir: Path, report: Callable[[str, str], None]) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._log_dir = log_dir
        self._report = report

    def start(self, islands: int, anchor: bool) -> None:
        for number in range(islands):
            self._fleet.start_island(f"island-{number}")
        if anchor:
            self._fleet.start_anchor()

    def wait_for_island(self) -> None:
        """Until one island is ready; the others join when they are. Raises SprawlError when none becomes ready."""
        deadline = time.monotonic() + self._fleet.start_s
        while not any(island.state == "ready" and is_live(island) for island in self._ledger.islands()):
            for lost in self._fleet.poll():
                raise SprawlError(f"{lost.name} ended with code {lost.returncode} while starting", f"see {lost.log}")
            if time.monotonic() > deadline:
                raise SprawlError(f"no island became ready within {self._fleet.start_s:.0f} s", f"see {self._log_dir}")
            time.sleep(POLL_S)

    def replace_lost(self) -> None:
        """Start again what died: a lost island or anchor costs time, never a step."""
        for lost in self._fleet.poll():
            kind = "anchor_lost" if lost.name == ANCHOR else "island_lost"
            self._report(kind, f"{lost.name} ended with code {lost.returncode}, see {lost.log.name}")
            log.warning("%s ended with code %s: starting it again (%s)", lost.name, lost.returncode, lost.log)
            if lost.name == ANCHOR:
                self._fleet.start_anchor()
            else:
                self._fleet.start_island(lost.name)

    def stop(self) -> None:
        self._fleet.stop()
