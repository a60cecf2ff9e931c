"""Whether islands keep up with the trainer: measured from the ledger, turned into a number of islands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.records import StepRecord
from sprawl.fleet.settings import FleetSettings

NOT_WAITING = 0.02  # share of a step below which the trainer does not wait for rollouts, it looks for them


@dataclass(frozen=True)
class Balance:
    """Means over the newest steps. Seconds; shares of 1.

    idle_share: of a step in which the trainer waited for rollouts.
    load: of the time between two batches that islands need for one; above 1 they do not keep up.
    queue_age_s: how long a batch lies before it is trained on.
    staleness: versions between sampling and training. islands: that sampled.
    """

    steps: int
    step_s: float
    idle_share: float
    load: float
    queue_age_s: float
    staleness: float
    islands: float


def measure(records: Sequence[StepRecord], ahead: int) -> Balance | None:
    """The balance over some steps; None without any. `ahead`: steps for which rollouts may be asked in advance
    (`rollout.max_staleness`).

    Islands have the trainer's own time of `ahead` steps to sample a batch (at least of one: without overlap the trainer
    waits for all of it). What they need beyond that it waits for; what they need less, the batch lies and they idle.
    """
    rows = [_row(record, ahead) for record in records if record.seconds.get("total", 0.0) > 0.0]
    if not rows:
        return None
    total = sum(row[0] for row in rows)
    waited, allowed, needed = (sum(row[i] for row in rows) for i in (1, 2, 3))
    idle = waited / total
    # While it waits, the trainer's pace is the islands' own: what they need a batch is then known from the pace.
    load = needed / allowed if allowed > 0 else math.inf
    if idle > NOT_WAITING and ahead > 0:
        load = max(min(load, 4.0), 1.0 / max(0.05, 1.0 - idle))
    return Balance(
        steps=len(rows),
        step_s=total / len(rows),
        idle_share=idle,
        load=load,
        queue_age_s=sum(max(0.0, row[2] - row[3]) for row in rows) / len(rows),
        staleness=sum(record.staleness for record in records) / len(records),
        islands=sum(max(1, len(record.islands)) for record in records) / len(records),
    )


def _row(record: StepRecord, ahead: int) -> tuple[float, float, float, float]:
    """Total, waited, allowed, needed: seconds of one step."""
    total = record.seconds["total"]
    waited = min(total, record.seconds.get("rollout_wait", 0.0))
    return total, waited, (total - waited) * max(1, ahead), record.seconds.get("rollout", waited)


def wanted_islands(balance: Balance | None, current: int, settings: FleetSettings) -> tuple[int, str]:
    """How many islands there should be and why, of `current` ones now. Pure; bounds are the caller's.

    Between `load_low` and `idle_high` nothing changes: what one more island would mend is noise there. It grows by half
    at most, because what was measured with few islands says little about many, and shrinks by one, because an island
    too many costs less than one too few.
    """
    if balance is None or balance.steps < settings.evidence:
        return current, "not enough steps measured"
    need = math.ceil(balance.islands * balance.load / settings.load_aim - 1e-9)
    if balance.idle_share > settings.idle_high and need > current:
        grown = min(need, current + max(1, current // 2))
        return grown, f"the trainer waits {balance.idle_share:.0%} of a step for rollouts"
    # Only what would still be enough with one island less: else the next look would add it again.
    load_after = balance.load * balance.islands / max(1.0, balance.islands - 1)
    if balance.load < settings.load_low and need < current and load_after < settings.load_aim:
        return current - 1, f"islands are busy {balance.load:.0%} of a step; batches lie {balance.queue_age_s:.0f} s"
    return current, "balanced"


def recent_steps(ledger: Ledger, count: int) -> list[StepRecord]:
    """The newest `count` step records, ascending: one listing, however many steps there are."""
    prefix = keys.steps(ledger.run_id)
    names = (name.removesuffix(".json") for name in ledger.store.children(prefix))
    newest = sorted(int(name) for name in names if name.isdecimal())[-count:]
    return [record for number in newest if (record := ledger.step(number)) is not None]
