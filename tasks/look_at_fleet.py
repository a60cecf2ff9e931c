"""Tasks: one look at a run's fleet, and its end."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task

if TYPE_CHECKING:
    from sprawl.board.store import Store
    from sprawl.fleet.controller import Controller
    from sprawl.fleet.port import IslandFleet


@task(task_run_name="look-{run_id}", persist_result=False, retries=2, retry_delay_seconds=10)
def look_at_fleet(run_id: str, controller: Controller) -> dict[str, Any]:
    """Measure, decide, start, drain, replace. A retry looks anew: what was done before it is on the board."""
    look = controller.look()
    log = get_run_logger()
    log.info("%d islands wanted: %s; %d machines, %d ready", look.target, look.reason, len(look.machines), look.alive)
    for what, names in (("started", look.started), ("drained", look.drained), ("cancelled", look.cancelled)):
        if names:
            log.info("%s %s", what, ", ".join(names))
    return asdict(look)


@task(task_run_name="reap-{run_id}", persist_result=False, retries=3, retry_delay_seconds=30)
def reap_fleet(run_id: str, store: Store, fleet: IslandFleet, drain_s: float) -> int:
    """End every island of the run; returns how many there were."""
    from sprawl.fleet.reap import reap

    return len(reap(store, run_id, fleet, drain_s=drain_s, reason="the run has ended").seen)
