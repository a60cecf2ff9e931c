"""What a run tells the world, by name: event names, labels and the resource they are about.

Whoever tells (tasks/events.py has the table) and whoever listens (automations, the fleet) read them here.
"""

from __future__ import annotations

VERSION_PUBLISHED = "sprawl.version.published"
VERSION_PROMOTED = "sprawl.version.promoted"
ANCHOR_FIRED = "sprawl.anchor.fired"
ISLAND_LOST = "sprawl.island.lost"
RUN_UNHEALTHY = "sprawl.run.unhealthy"
RUN_FINISHED = "sprawl.run.finished"

EVERY = (1, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Intervals that a listener can choose for "every n-th version": triggers compare labels and cannot divide."""
REASON = "sprawl.reason"
"""Label of RUN_UNHEALTHY: a `sprawl.report.health.Reason`."""
APPROVED = "sprawl.approved"
"""Label of VERSION_PROMOTED: "true" or "false"."""


def every(n: int) -> str:
    """Label of VERSION_PUBLISHED, "true" for every n of EVERY that divides the version."""
    return f"sprawl.every-{n}"


def resource(run_id: str) -> str:
    """The resource that every event of a run is about; "*" for any run."""
    return f"sprawl.run.{run_id}"
