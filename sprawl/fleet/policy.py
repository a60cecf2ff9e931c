"""What to do next about a fleet: a pure function of what was decided before, what machines there are, which islands
are alive, and how many are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sprawl.board.fleet_log import FleetRecord, Order
from sprawl.board.ledger import is_live
from sprawl.board.records import IslandRecord
from sprawl.fleet.port import Machine
from sprawl.fleet.settings import FleetSettings

PREFIX = "island-"


@dataclass(frozen=True)
class View:
    """One look. `machines` must have been asked for before `decided` was read: then every machine there is a decision
    for is known to it, and one without is really nobody's."""

    now: float
    decided: FleetRecord
    machines: tuple[Machine, ...]
    islands: tuple[IslandRecord, ...]


@dataclass
class Actions:
    """In this order. `decision` comes first: it is written before anything is done."""

    decision: FleetRecord
    cancel: list[str] = field(default_factory=list)
    drain: list[str] = field(default_factory=list)
    start: list[str] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)  # records on the board of islands that have no machine any more
    notes: list[tuple[str, str]] = field(default_factory=list)  # (kind, message) for the run's ledger


def decide(view: View, target: int, reason: str, settings: FleetSettings, *, parked: bool = False) -> Actions:
    """Bring the fleet towards `target` islands. `parked`: the target is none because the run stands still.

    Keeps what the platform is mending itself (pending, recovering), replaces what is lost, never has more islands than
    the cap on cost allows, draining ones included, and pauses longer after every island that never came up.
    """
    plan = _Plan(view, settings)
    for island_id, order in view.decided.islands.items():
        plan.follow(island_id, order)
    plan.cancel_strangers()
    wanted = max(0, min(target, settings.affordable))
    plan.resize(wanted)
    before = view.decided
    parked_at = (before.parked_at or view.now) if parked else None
    plan.actions.decision = before.model_copy(
        update={
            "at": view.now,
            "target": wanted,
            "islands": dict(plan.orders),
            "named": plan.named,
            "changed_at": plan.changed_at,
            "failures": plan.failures,
            "failed_at": plan.failed_at,
            "parked_at": parked_at,
            "reason": reason,
        }
    )
    return plan.actions


def differs(before: FleetRecord, after: FleetRecord) -> bool:
    """Whether there is anything to write down."""
    ignored = {"number", "nonce", "at", "reason"}
    return before.model_dump(exclude=ignored) != after.model_dump(exclude=ignored)


def pause(failures: int, settings: FleetSettings) -> float:
    """Seconds before the next start, after so many islands in a row that never came up."""
    if failures == 0:
        return settings.grow_cooldown_s
    return min(settings.backoff_limit_s, max(settings.grow_cooldown_s, 30.0) * 2.0 ** min(failures, 16))


class _Plan:
    """The decision while it is made. Orders that are dropped have no machine, or one that is cancelled."""

    def __init__(self, view: View, settings: FleetSettings) -> None:
        self.view, self.settings = view, settings
        self.machines: Mapping[str, Machine] = {machine.island_id: machine for machine in view.machines}
        self.alive = {island.island_id: island for island in view.islands if is_live(island, view.now)}
        self.records = {island.island_id: island for island in view.islands}
        self.orders: dict[str, Order] = {}
        self.lost = 0  # islands to replace, which are not part of growing
        self.leaving = 0  # not gone yet: they cost money
        before = view.decided
        self.named, self.changed_at = before.named, before.changed_at
        self.failures, self.failed_at = before.failures, before.failed_at
        self.actions = Actions(before)

    def follow(self, island_id: str, order: Order) -> None:
        """Keep an order, or find that it is done, lost or overdue."""
        machine, now = self.machines.get(island_id), self.view.now
        age = now - order.since
        if order.do == "drain":
            self._leave(island_id, order, machine, age)
            return
        if machine is None:
            if age <= self.settings.appear_limit_s and not order.seen:
                self.orders[island_id] = order
                return
            self._lost(island_id, order, "its machine is gone" if order.seen else "its machine never came")
            return
        if machine.phase == "ending":
            self._lost(island_id, order, "its machine ends")
            return
        why = self._silent(island_id, order, machine)
        if why is not None:
            self.actions.cancel.append(island_id)
            self.leaving += 1
            self._lost(island_id, order, why)
            return
        if island_id in self.alive and not order.seen:
            order = order.model_copy(update={"seen": True})
            self.failures = 0
        self.orders[island_id] = order

    def _leave(self, island_id: str, order: Order, machine: Machine | None, age: float) -> None:
        """See a draining island off. What is asked for is asked for again: the one who decided may have died before."""
        if machine is None and (order.seen or age > self.settings.appear_limit_s):
            self._gone(island_id)
            return
        self.leaving += 1
        self.orders[island_id] = order
        if machine is None or machine.phase == "ending":
            return
        # A draining island falls silent before it ends: only its time is measured. One that was never there has nothing
        # to finish.
        if not order.seen or age > self.settings.drain_limit_s:
            self.actions.cancel.append(island_id)
        else:
            self.actions.drain.append(island_id)

    def _silent(self, island_id: str, order: Order, machine: Machine) -> str | None:
        """Why an island whose machine is there has to be replaced; None when it need not be."""
        record, now = self.records.get(island_id), self.view.now
        if record is not None and record.state == "failed" and now - record.heartbeat_at <= self.settings.lost_after_s:
            return f"it failed: {record.last_error or 'no reason given'}"
        if island_id in self.alive or machine.phase in ("pending", "recovering"):
            return None
        # A machine that came again after a preemption starts anew: its silence counts from there.
        up = max(order.since, machine.since or 0.0)
        heard = record.heartbeat_at if record is not None else 0.0
        if machine.phase == "running" and heard > up and now - heard > self.settings.lost_after_s:
            return f"no heartbeat for {now - heard:.0f} s"
        if heard <= up and now - up > self.settings.start_limit_s:
            return f"no heartbeat {now - up:.0f} s after its machine came"
        return None

    def _lost(self, island_id: str, order: Order, why: str) -> None:
        self.lost += 1
        if not order.seen:
            self.failures += 1
            self.failed_at = self.view.now
        self.actions.notes.append(("island_lost", f"{island_id}: {why}"))
        self._gone(island_id)

    def _gone(self, island_id: str) -> None:
        if island_id in self.records:
            self.actions.forget.append(island_id)

    def cancel_strangers(self) -> None:
        """Machines that nothing decided: of a controller that died before the board had its decision, or of a start
        that took effect after it was given up."""
        for island_id, machine in self.machines.items():
            if island_id not in self.view.decided.islands and machine.phase != "ending":
                self.actions.cancel.append(island_id)
                self.leaving += 1
                self.actions.notes.append(("fleet", f"{island_id}: a machine that nobody asked for, cancelled"))

    def resize(self, wanted: int) -> None:
        running = [name for name, order in self.orders.items() if order.do == "run"]
        if len(running) < wanted:
            self._grow(wanted, running)
        elif len(running) > wanted:
            self._shrink(wanted, running)

    def _grow(self, wanted: int, running: list[str]) -> None:
        now, settings = self.view.now, self.settings
        if self.failures and now - self.failed_at < pause(self.failures, settings):
            return
        missing = wanted - len(running)
        # What was lost is replaced at once; more than there was waits for the cool-down.
        cool = now - self.changed_at >= settings.grow_cooldown_s or not self.view.decided.islands
        count = missing if cool else min(missing, self.lost)
        count = min(count, max(0, settings.affordable - len(running) - self.leaving))
        for _ in range(count):
            name = f"{PREFIX}{self.named}"
            self.named += 1
            self.orders[name] = Order(do="run", since=now)
            self.actions.start.append(name)
        if count > self.lost:
            self.changed_at = now

    def _shrink(self, wanted: int, running: list[str]) -> None:
        now, settings = self.view.now, self.settings
        over_cap = len(running) > settings.affordable
        if now - self.changed_at < settings.shrink_cooldown_s and wanted > 0 and not over_cap:
            return
        # Those that nobody would miss first: not there yet, then not in service, then the youngest.
        ranked = sorted(running, key=lambda name: (self._worth(name), -self.orders[name].since, -_number(name)))
        for name in ranked[: len(running) - wanted]:
            alive = name in self.alive
            self.orders[name] = Order(do="drain", since=now, seen=alive)
            (self.actions.drain if alive else self.actions.cancel).append(name)
        self.changed_at = now

    def _worth(self, name: str) -> int:
        if name in self.alive:
            return 3 if self.alive[name].state == "ready" else 2
        machine = self.machines.get(name)
        return 1 if machine is not None and machine.phase in ("starting", "running") else 0


def _number(island_id: str) -> int:
    """Of a name given here; names are given in this order."""
    return int(island_id.removeprefix(PREFIX))
