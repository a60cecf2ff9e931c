"""A run whose steps are written by the test, and a cloud that outlives its controllers."""

from __future__ import annotations

from typing import Any

from sprawl.board.ledger import Ledger
from sprawl.board.records import EventRecord, RunRecord, StepRecord
from sprawl.board.store import MemoryStore
from sprawl.fleet.controller import Controller
from sprawl.fleet.fake import FakeCloud
from sprawl.fleet.settings import FleetSettings

RUN = "fleet-run"
STEPS = 1000
ZERO = (
    *("reward", "reward_std", "response_length", "mismatch", "ratio_max_error"),
    *("clip_share", "loss", "grad_norm", "changed_share"),
)
CONFIG = {"name": "t", "steps": STEPS, "policy": {"base": "x"}, "rollout": {"max_staleness": 1}}


class World:
    """A board with a run on it and a fake cloud; `look` makes a new controller every time, as a scheduler does."""

    def __init__(self, settings: FleetSettings | None = None, **cloud: Any) -> None:
        self.store = MemoryStore()
        self.ledger = Ledger(self.store, RUN)
        self.ledger.create_run(
            RunRecord(
                run_id=RUN, created_at=0.0, config=CONFIG, base_digest="0", parameters=1, sprawl_version="0", host={}
            )
        )
        self.settings = settings or FleetSettings(grow_cooldown_s=0, shrink_cooldown_s=0)
        self.cloud = FakeCloud(self.store, RUN, now=1000.0, **cloud)
        self.steps = 0

    def controller(self) -> Controller:
        return Controller(self.store, RUN, self.cloud, self.settings, now=lambda: self.cloud.now)

    def look(self):
        return self.controller().look()

    def settle(self, seconds: float = 60.0, every: float = 5.0) -> None:
        """Let time pass, looking every now and then."""
        for _ in range(round(seconds / every)):
            self.cloud.advance(every)
            self.look()

    def step(self, *, wait_s: float, rollout_s: float, busy_s: float = 10.0, islands: int | None = None) -> None:
        """One step of the trainer, finished now."""
        self.steps += 1
        count = self.cloud.serving if islands is None else islands
        self.ledger.write_step(step_record(self.steps, self.cloud.now, wait_s, rollout_s, busy_s, count))

    def event(self, kind: str, step: int = 0) -> None:
        self.ledger.write_event(EventRecord(kind=kind, at=self.cloud.now, step=step, message=kind))


def step_record(
    step: int, finished_at: float, wait_s: float, rollout_s: float, busy_s: float, islands: int
) -> StepRecord:
    seconds = {"total": busy_s + wait_s, "rollout_wait": wait_s, "rollout": rollout_s}
    wire = {"sent": 1, "dense": 1}
    return StepRecord.model_validate(
        {
            **dict.fromkeys(ZERO, 0.0),
            "step": step,
            "epoch": 1,
            "version": step,
            "finished_at": finished_at,
            "groups": 1,
            "zero_advantage_groups": 0,
            "response_tokens": 1,
            "entropy": {"compression": 0.0},
            "kl": {"compression": 0.0},
            "applied": True,
            "staleness": 1.0,
            "staleness_max": 1,
            "boundary": wire,
            "delta": wire,
            "sign": wire,
            "seconds": seconds,
            "islands": {f"island-{number}": 1 for number in range(islands)},
        }
    )
