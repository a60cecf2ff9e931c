"""The end of a fleet: nothing that costs money is left behind, however its controllers ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sprawl.board.fleet_log import FleetLog
from sprawl.board.ledger import Ledger
from sprawl.board.store import Store
from sprawl.errors import SprawlError
from sprawl.fleet.port import IslandFleet

POLL_S = 2.0
"""Between two looks; longer, a tenth of `settle_s`, where a look costs an API server seconds of CPU."""
LIMIT_S = 900.0


@dataclass(frozen=True)
class Reaped:
    """What there was to end: islands that drained by themselves or were cancelled."""

    cancelled: tuple[str, ...]
    seen: tuple[str, ...]
    seconds: float


def reap(
    store: Store,
    run_id: str,
    fleet: IslandFleet,
    *,
    drain_s: float = 0.0,
    reason: str = "reaped",
    limit_s: float = LIMIT_S,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Reaped:
    """End every island of a run and return when none is left. Idempotent; may be killed and run again.

    First the fleet is closed on its log: from then on no controller starts anything, and islands that come up late end
    by themselves. Then machines are cancelled (those that are in service get `drain_s` to finish) until none has been
    seen for the fleet's `settle_s`, so that starts which were under way are caught too.

    Raises SprawlError when machines are still there after `limit_s`, or cannot be asked about.
    """
    closed = FleetLog(store, run_id).close(reason, now())
    began = now()
    quiet_since: float | None = None
    seen: dict[str, None] = {}
    cancelled: dict[str, None] = {}
    while True:
        machines = fleet.machines()
        at = now()
        if not machines:
            quiet_since = at if quiet_since is None else quiet_since
            if at - quiet_since >= fleet.settle_s:
                break
        else:
            quiet_since = None
            for machine in machines:
                seen[machine.island_id] = None
                if machine.phase == "ending" or (machine.phase == "running" and at - began < drain_s):
                    continue
                fleet.cancel_island(machine.island_id)
                cancelled[machine.island_id] = None
            if at - began > limit_s:
                names = ", ".join(f"{machine.island_id} ({machine.phase})" for machine in machines[:5])
                raise SprawlError(f"{len(machines)} machines are still there: {names}", "run `sprawl fleet reap` again")
        sleep(max(POLL_S, fleet.settle_s / 10))
    ledger = Ledger(store, run_id)
    for island in ledger.islands():
        if island.island_id in seen or island.island_id in closed.islands:
            ledger.remove_island(island.island_id)
    return Reaped(tuple(cancelled), tuple(seen), now() - began)
