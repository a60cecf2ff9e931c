"""Task: one fire of the anchor circuit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE

if TYPE_CHECKING:
    from sprawl.anchor.service import AnchorService


@task(
    name="fire-anchor",
    task_run_name="fire-anchor-{step}",
    retries=2,  # safe: a fire that is on the board is returned as it is
    retry_delay_seconds=[1, 5],
    cache_policy=NO_CACHE,
    persist_result=False,
)
def fire_anchor(service: AnchorService, step: int) -> None:
    """Replay dense at the stale weights and put the sign map and the fire's record on the board."""
    service.fire(step)
