"""Lost processes are started again, and the ledger says so."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sprawl.board.ledger import Ledger
from sprawl.board.records import IslandRecord
from sprawl.board.store import MemoryStore
from sprawl.errors import SprawlError
from sprawl.run.crew import Crew
from sprawl.run.fleet import Exit


class FakeFleet:
    """Records what it is asked to do; `lost` is what the next poll reports."""

    start_s = 180.0

    def __init__(self) -> None:
        self.started: list[str] = []
        self.lost: list[Exit] = []
        self.stopped = 0

    def start_island(self, island_id: str) -> None:
        self.started.append(island_id)

    def start_anchor(self) -> None:
        self.started.append("anchor")

    def poll(self) -> list[Exit]:
        lost, self.lost = self.lost, []
        return lost

    def stop(self) -> None:
        self.stopped += 1


def make_crew() -> tuple[Crew, FakeFleet, Ledger, list[tuple[str, str]]]:
    fleet, ledger = FakeFleet(), Ledger(MemoryStore("crew"), "run")
    events: list[tuple[str, str]] = []
    return Crew(fleet, ledger, Path("logs"), lambda *event: events.append(event)), fleet, ledger, events


def heartbeat(ledger: Ledger, state: str, age_s: float = 0.0) -> None:
    now = time.time()
    ledger.heartbeat(
        IslandRecord.model_validate(
            {
                "island_id": "island-0",
                "url": "http://x",
                "state": state,
                "applied": 0,
                "started_at": now,
                "heartbeat_at": now - age_s,
                "interval_s": 2.0,
            }
        )
    )


def test_what_dies_is_started_again_and_reported() -> None:
    crew, fleet, _, events = make_crew()
    crew.start(2, anchor=True)
    assert fleet.started == ["island-0", "island-1", "anchor"]
    fleet.lost = [Exit("island-1", -9, Path("logs/island-1.log")), Exit("anchor", 1, Path("logs/anchor.log"))]
    crew.replace_lost()
    assert fleet.started[3:] == ["island-1", "anchor"]
    assert [kind for kind, _ in events] == ["island_lost", "anchor_lost"]
    assert "island-1 ended with code -9" in events[0][1]
    crew.replace_lost()
    assert len(events) == 2


def test_waits_for_a_ready_island_with_a_fresh_heartbeat() -> None:
    crew, fleet, ledger, _ = make_crew()
    heartbeat(ledger, "ready", age_s=60)  # of a run that was killed
    fleet.lost = [Exit("island-0", 2, Path("logs/island-0.log"))]
    with pytest.raises(SprawlError, match=r"island-0 ended with code 2 while starting \(see logs/island-0\.log\)"):
        crew.wait_for_island()
    heartbeat(ledger, "ready")
    crew.wait_for_island()
