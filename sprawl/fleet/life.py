"""Whether a run goes on, from what is on its board."""

from __future__ import annotations

from dataclasses import dataclass

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.config import parse_config


@dataclass(frozen=True)
class Life:
    """finished: all steps are done and the run said so. last_at: Unix seconds of its last sign of life (a step, an
    event of its trainer, a trainer that took it over). ahead: `rollout.max_staleness`."""

    finished: bool
    last_at: float
    ahead: int


def look_at_run(ledger: Ledger) -> Life:
    """A few small reads and two listings. Raises BoardError when there is no such run."""
    run = ledger.run()
    config = parse_config(run.config, f"run.json of {run.run_id}")
    steps = _numbers(ledger, keys.steps(ledger.run_id))
    newest = ledger.step(steps[-1]) if steps else None
    last_at = max(run.created_at, newest.finished_at if newest else 0.0)
    finished = False
    # Names of events begin with the time in nanoseconds; only those since the last step can say something new.
    names = [name.removesuffix(".json") for name in ledger.store.children(keys.events(ledger.run_id))]
    for name in sorted(names)[-20:]:
        event = ledger.event(name)
        if event is None or event.kind in ("island_lost", "fleet"):  # the fleet's own
            continue
        last_at = max(last_at, event.at)
        if event.kind == "finish":
            finished = event.step >= config.steps
        elif event.kind in ("start", "resume"):
            finished = False
    if epochs := _numbers(ledger, keys.epochs(ledger.run_id)):
        last_at = max(last_at, ledger.epoch_taken_at(epochs[-1]))
    return Life(finished, last_at, config.rollout.max_staleness)


def _numbers(ledger: Ledger, prefix: str) -> list[int]:
    names = (name.removesuffix(".json") for name in ledger.store.children(prefix))
    return sorted(int(name) for name in names if name.isdecimal())
