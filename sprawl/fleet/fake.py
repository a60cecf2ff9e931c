"""A fleet without machines: the fake of the port, with a clock of its own.

What it keeps is what a cloud keeps: it outlives its callers, takes time for everything, and can lose machines and run
out of them. Its islands do as real ones do: they write heartbeats, drain, and obey the fleet's log.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sprawl.board.fleet_log import FleetLog, wants
from sprawl.board.ledger import Ledger
from sprawl.board.records import IslandRecord
from sprawl.board.store import Store
from sprawl.fleet.port import Machine, Phase

HEARTBEAT_S = 2.0


@dataclass
class FakeMachine:
    """`due`: when the present phase ends by itself."""

    island_id: str
    asked_at: float
    visible_at: float
    phase: Phase = "pending"
    due: float = float("inf")
    since: float = 0.0
    drains: bool = False


@dataclass
class FakeCloud:
    """Times in seconds. `capacity`: machines that can be had at a time; None: any number."""

    store: Store
    run_id: str
    now: float = 0.0
    appear_s: float = 0.0
    boot_s: float = 0.0
    drain_s: float = 0.0
    end_s: float = 0.0
    capacity: int | None = None
    settle_s: float = 0.0
    there: dict[str, FakeMachine] = field(default_factory=dict)
    paid_s: float = 0.0  # machine-seconds
    mute: set[str] = field(default_factory=set)  # islands whose heartbeats stopped although their machines run

    def __post_init__(self) -> None:
        self._ledger = Ledger(self.store, self.run_id)
        self._log = FleetLog(self.store, self.run_id)

    # --- the port ---

    def start_island(self, island_id: str) -> None:
        if island_id not in self.there:
            self.there[island_id] = FakeMachine(island_id, self.now, self.now + self.appear_s, since=self.now)

    def drain_island(self, island_id: str) -> None:
        machine = self.there.get(island_id)
        if machine is not None and machine.phase == "running" and not machine.drains:
            self._drain(machine)

    def cancel_island(self, island_id: str) -> None:
        machine = self.there.get(island_id)
        if machine is None or self.now < machine.visible_at or machine.phase == "ending":
            return  # what the cloud does not tell of yet cannot be cancelled
        machine.phase, machine.due = "ending", self.now + self.end_s

    def machines(self) -> list[Machine]:
        return [
            Machine(machine.island_id, machine.phase, machine.since)
            for machine in self.there.values()
            if self.now >= machine.visible_at
        ]

    # --- the world ---

    @property
    def paid_for(self) -> int:
        """Machines that cost money now."""
        return sum(machine.phase in ("starting", "running", "ending") for machine in self.there.values())

    @property
    def serving(self) -> int:
        """Islands that requests are sent to."""
        return sum(
            machine.phase == "running" and not machine.drains and machine.island_id not in self.mute
            for machine in self.there.values()
        )

    def preempt(self, island_id: str) -> None:
        """Take a machine without a word; the platform looks for another one."""
        machine = self.there[island_id]
        machine.phase, machine.due, machine.drains = "recovering", float("inf"), False

    def advance(self, seconds: float) -> None:
        """Let time pass, all of it at once: phases whose time has come end, islands write heartbeats."""
        self.paid_s += self.paid_for * seconds
        self.now += seconds
        head = self._log.head()
        for machine in list(self.there.values()):
            if self.now >= machine.visible_at:
                self._advance(machine)
            if machine.phase == "running" and not machine.drains and not wants(head, machine.island_id):
                self._drain(machine)
        if self.capacity is not None:
            holding = [m for m in self.there.values() if m.phase in ("starting", "running")]
            for machine in holding[self.capacity :]:
                self.preempt(machine.island_id)

    def _advance(self, machine: FakeMachine) -> None:
        if machine.phase == "ending":
            if self.now >= machine.due:
                del self.there[machine.island_id]
            return
        if machine.phase in ("pending", "recovering") and self._room():
            machine.phase, machine.due, machine.since = "starting", self.now + self.boot_s, self.now
        if machine.phase == "starting" and self.now >= machine.due:
            machine.phase, machine.due, machine.since = "running", float("inf"), self.now
        if machine.phase == "running" and self.now >= machine.due:  # drained
            self._ledger.remove_island(machine.island_id)
            machine.phase, machine.due = "ending", self.now + self.end_s
        elif machine.phase == "running" and not machine.drains and machine.island_id not in self.mute:
            self._beat(machine)

    def _room(self) -> bool:
        return self.capacity is None or self.capacity > sum(
            m.phase in ("starting", "running") for m in self.there.values()
        )

    def _drain(self, machine: FakeMachine) -> None:
        machine.drains, machine.due = True, self.now + self.drain_s

    def _beat(self, machine: FakeMachine) -> None:
        self._ledger.heartbeat(
            IslandRecord(
                island_id=machine.island_id,
                url=f"http://{machine.island_id}",
                state="ready",
                applied=0,
                started_at=machine.since,
                heartbeat_at=self.now,
                interval_s=HEARTBEAT_S,
            )
        )
