"""The drift controller's place in a run: facts from the ledger in, a step's steering, requests and events out.

A decision is made from what is durable: the records of the steps before, and the decision of the step before, which
stands in that version's manifest. Nothing is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from sprawl.anchor.forecast import last_fire
from sprawl.board.ledger import Ledger
from sprawl.board.records import ControlRecord, FireRequest, StepRecord
from sprawl.config import RunConfig
from sprawl.control.levels import Circuit, decide, history_needed
from sprawl.control.observation import Observation, observe
from sprawl.control.verdict import remedy
from sprawl.errors import Verdict
from sprawl.train.steering import AS_CONFIGURED, Steering

Report = Callable[[str, str, dict[str, Any], int], None]

KEY = "control"  # in a manifest's `extra`


class Controller:
    """`record` is the decision of the step that was decided or replayed last; None while `control.enabled` is false.

    `report(kind, message, data, step)` writes an event to the ledger. `requested`: steps of all fires that were asked
    for between the regular ones, ascending, those of a run before the resume included.
    """

    def __init__(self, config: RunConfig, ledger: Ledger, report: Report) -> None:
        self._config = config.control
        self._ledger = ledger
        self._report = report
        anchor = config.anchor
        self._circuit = Circuit(
            fire_every=anchor.every if anchor.enabled else None,
            lag=anchor.lag,
            checkpoint_every=config.checkpoint.every,
            last_fire=last_fire(config.steps, anchor.every),
            compressed=config.boundary.codec != "dense",
        )
        self._history: deque[Observation] = deque(maxlen=history_needed(self._config))
        self.record: ControlRecord | None = None
        self.requested: list[int] = ledger.fire_requests() if self._config.enabled else []

    def decide(self, step: int, sign_fire: int | None) -> Steering:
        """What step `step` does, with the sign map of `sign_fire`. Requests and events are on the board afterwards.

        Raises Verdict when the run is to stop here.
        """
        if not self._config.enabled:
            return AS_CONFIGURED
        before = self.record or ControlRecord()
        age = None if sign_fire is None else step - sign_fire
        now = decide(step, before, list(self._history), age, self._config, self._circuit)
        seen = "; ".join(now.symptoms.values())
        if now.level != before.level:
            message = f"level {before.level} -> {now.level}" + (f": {seen}" if seen else ": quiet")
            self._report("control", message, now.model_dump(), step)
        if now.fire is not None and now.fire not in self.requested:
            self._ledger.write_fire_request(FireRequest(step=now.fire, requested_at=step, reason=seen or "level held"))
            self.requested.append(now.fire)
        if now.verdict is not None:
            self._report("verdict", now.verdict, now.model_dump(), step)
            raise Verdict(now.verdict, remedy(now.symptoms))
        self.record = now
        return steering(now)

    def replay(self, extra: Mapping[str, Any]) -> Steering:
        """What a committed step did, from its manifest."""
        if KEY not in extra:
            return AS_CONFIGURED
        self.record = ControlRecord.model_validate(extra[KEY])
        return steering(self.record)

    def recall(self, head: int, extra: Mapping[str, Any]) -> None:
        """Go on behind the committed step `head`, whose manifest has `extra`."""
        if not self._config.enabled:
            return
        self.replay(extra)
        self._history.clear()
        for step in range(max(1, head + 1 - history_needed(self._config)), head + 1):
            if (record := self._ledger.step(step)) is not None:
                self._history.append(observe(record))

    def observe(self, record: StepRecord) -> None:
        """A step has been committed."""
        self._history.append(observe(record))

    def extra(self) -> dict[str, Any]:
        """What the manifest of the step has to say about it."""
        return {} if self.record is None else {KEY: self.record.model_dump()}


def steering(record: ControlRecord) -> Steering:
    return Steering(record.sign_strength, record.lr_scale, record.dense, record.probe)
