"""Looks at a run's fleet, decides, acts. All state is on the board and with the platform: any process may do the next
look, and one that is killed between any two effects leaves nothing that the next look, or `reap`, does not find."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from sprawl.board.fleet_log import FleetLog, FleetRecord
from sprawl.board.ledger import Ledger
from sprawl.board.records import EventRecord
from sprawl.board.store import Store
from sprawl.errors import SprawlError
from sprawl.fleet.balance import Balance, measure, recent_steps, wanted_islands
from sprawl.fleet.life import Life, look_at_run
from sprawl.fleet.policy import Actions, View, decide, differs
from sprawl.fleet.port import IslandFleet, Machine
from sprawl.fleet.settings import FleetSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Look:
    """What one look found and did. `open`: there will be something to do next time. `superseded`: somebody else decided
    meanwhile, so nothing was done."""

    open: bool
    target: int
    machines: tuple[Machine, ...]
    alive: int
    reason: str
    balance: Balance | None = None
    started: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    superseded: bool = False


class Controller:
    """One run's fleet. `now` gives Unix seconds."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        fleet: IslandFleet,
        settings: FleetSettings,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.ledger = Ledger(store, run_id)
        self.log = FleetLog(store, run_id)
        self.fleet = fleet
        self.settings = settings
        self._now = now
        self._steps = 0
        self._ahead = 1

    def look(self) -> Look:
        """Look once and do what is to be done. Raises SprawlError when board or platform cannot be asked; a single
        effect that fails is logged, and done again at the next look."""
        machines = tuple(self.fleet.machines())
        decided = self.log.head()
        if decided is None:
            decided = self.log.open("first look", self._now())
        if decided.state == "closed":
            return Look(False, 0, machines, 0, "closed")
        life = look_at_run(self.ledger)
        islands = tuple(self.ledger.islands())
        view = View(self._now(), decided, machines, islands)
        balance = self._balance(life, decided)
        target, reason, parked = self._target(life, view, balance)
        actions = decide(view, target, reason, self.settings, parked=parked)
        done = Look(
            not (life.finished and not actions.decision.islands),
            actions.decision.target,
            machines,
            sum(island.state == "ready" for island in islands),
            reason,
            balance,
            tuple(actions.start),
            tuple(actions.drain),
            tuple(actions.cancel),
        )
        if differs(decided, actions.decision) and not self.log.append(actions.decision):
            return Look(True, decided.target, machines, 0, "somebody else decided", superseded=True)
        self._act(actions)
        return done

    def _balance(self, life: Life, decided: FleetRecord) -> Balance | None:
        """Over the newest steps that began after the last change had its effect, so that none is answered twice."""
        steps = recent_steps(self.ledger, self.settings.window)
        since = decided.changed_at
        return measure([s for s in steps if s.finished_at - s.seconds.get("total", 0.0) >= since], life.ahead)

    def _target(self, life: Life, view: View, balance: Balance | None) -> tuple[int, str, bool]:
        settings, decided = self.settings, view.decided
        if life.finished:
            return 0, "the run has ended", False
        if decided.parked_at is not None and life.last_at <= decided.parked_at:
            return 0, "the run stands still", True
        ready = [island for island in view.islands if island.state == "ready"]
        waiting_since = max(life.last_at, decided.changed_at if decided.target else 0.0)
        if view.now - waiting_since > settings.stall_s and any(
            island.started_at < view.now - settings.stall_s for island in ready
        ):
            return 0, f"no step for {view.now - life.last_at:.0f} s although islands are ready", True
        if not decided.islands and (decided.target == 0 or decided.parked_at is not None):
            return settings.start_islands, "the run begins", False
        wanted, reason = wanted_islands(balance, decided.target, settings)
        return max(settings.min_islands, min(wanted, settings.max_islands)), reason, False

    def _act(self, actions: Actions) -> None:
        for island_id in actions.cancel:
            self._try("cancel", island_id, self.fleet.cancel_island)
        for island_id in actions.drain:
            self._try("drain", island_id, self.fleet.drain_island)
        for island_id in actions.start:
            self._try("start", island_id, self.fleet.start_island)
        for island_id in actions.forget:
            self._try("forget", island_id, self.ledger.remove_island)
        for kind, message in actions.notes:
            log.info("%s", message)
            self.ledger.write_event(EventRecord(kind=kind, at=self._now(), step=0, message=message))
        head = self.log.head()
        if head is not None and head.state == "closed":  # reaped meanwhile: what was just started is nobody's
            for island_id in actions.start:
                self._try("cancel", island_id, self.fleet.cancel_island)

    def _try(self, what: str, island_id: str, effect: Callable[[str], None]) -> None:
        try:
            effect(island_id)
        except (SprawlError, OSError) as error:
            log.warning("%s %s: %s", what, island_id, error)
