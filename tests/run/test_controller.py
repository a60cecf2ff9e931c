"""The controller's place in a run: what it leaves on the board, and that a resumed one decides the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sprawl.board.ledger import Ledger
from sprawl.board.records import ControlRecord
from sprawl.board.store import MemoryStore
from sprawl.config import RunConfig, parse_config
from sprawl.errors import SprawlError, Verdict
from sprawl.run.controller import Controller
from sprawl.train.steering import AS_CONFIGURED, Steering
from tests.report.plausible import make_config, make_run_record, make_step

STEPS = 120


class Board:
    """A run whose dense view moves too fast from step 45 on, or whose reward is lost."""

    def __init__(self, **control: Any) -> None:
        data = make_config("control.enabled=true", "checkpoint.every=10", steps=200)
        self.config: RunConfig = parse_config(data | {"control": data["control"] | control})
        self.ledger = Ledger(MemoryStore(f"control-{random.random()}"), "run")
        self.ledger.create_run(make_run_record(run_id="run"))
        self.events: list[tuple[str, str, int]] = []
        self.extras: dict[int, dict[str, Any]] = {0: {}}

    def controller(self) -> Controller:
        return Controller(
            self.config, self.ledger, lambda kind, text, data, step: self.events.append((kind, text, step))
        )

    def steps(self, controller: Controller, first: int, last: int, lost: bool = False) -> list[Steering]:
        found = []
        for step in range(first, last + 1):
            noise = random.Random(step)
            found.append(controller.decide(step, (step - 1) // 20 * 20 or None))
            self.extras[step] = controller.extra()
            record = make_step(
                step,
                reward=0.1 if lost and step > 40 else 0.5 + noise.gauss(0, 0.02),
                mismatch=4.3 + noise.gauss(0, 0.05),
                mismatch_dense=0.03 if step >= 45 and (step % 5 == 0 or found[-1].probe) else 0.004,
                sign_fire=(step - 1) // 20 * 20 or None,
                sign_age=(step - 1) % 20 + 1 if step > 20 else None,
                control=controller.record,
            )
            self.ledger.write_step(record)
            controller.observe(record)
        return found


def test_acting_leaves_events_and_requests_on_the_board() -> None:
    board = Board()
    found = board.steps(board.controller(), 1, STEPS)
    assert found[44] == AS_CONFIGURED
    assert found[45].sign_strength < 1
    assert min(steering.lr_scale for steering in found) == 0.125
    changes = [(text, step) for kind, text, step in board.events if kind == "control"]
    assert changes[0] == ("level 0 -> 1: the dense view moves 0.03 nats/token a version (step 45)", 46)
    assert board.ledger.fire_requests() == [50, 70, 90, 110, 130][: len(board.ledger.fire_requests())]
    assert board.ledger.fire_requests()[0] == 50
    assert all(record.control is not None for record in board.ledger.steps())


@pytest.mark.parametrize("killed", [44, 46, 63, 100])
def test_a_resumed_controller_decides_what_the_undisturbed_one_did(killed: int) -> None:
    calm, hurt = Board(), Board()
    expected = calm.steps(calm.controller(), 1, STEPS)
    hurt.steps(hurt.controller(), 1, killed)
    resumed = hurt.controller()
    for step in range(killed - 5, killed + 1):  # replayed from the checkpoint before
        assert resumed.replay(hurt.extras[step]) == expected[step - 1]
    resumed.recall(killed, hurt.extras[killed])
    assert resumed.requested == hurt.ledger.fire_requests()
    assert hurt.steps(resumed, killed + 1, STEPS) == expected[killed:]
    assert hurt.ledger.fire_requests() == calm.ledger.fire_requests()
    assert [record.control for record in hurt.ledger.steps()] == [record.control for record in calm.ledger.steps()]


def test_a_verdict_says_what_was_seen_and_what_to_try_and_stands_on_resume() -> None:
    board = Board()
    with pytest.raises(Verdict, match=r"the reward fell from 0\.5.* to 0\.1.*lower optimizer.lr") as caught:
        board.steps(board.controller(), 1, STEPS, lost=True)
    assert caught.value.exit_code == 3
    assert SprawlError("x").exit_code == 2
    kind, text, step = board.events[-1]
    assert kind == "verdict"
    assert f"stopped before step {step}" in text
    last = board.ledger.steps()[-1].step
    assert step == last + 1
    again = board.controller()
    again.recall(last, board.extras[last])
    with pytest.raises(Verdict, match=f"stopped before step {step}"):
        again.decide(step, None)


def test_switched_off_it_says_and_writes_nothing() -> None:
    board = Board(enabled=False)
    controller = board.controller()
    assert set(board.steps(controller, 1, STEPS)) == {AS_CONFIGURED}
    assert controller.extra() == {}
    assert controller.record is None
    assert board.events == []
    assert controller.replay({"sign_fire": 20}) == AS_CONFIGURED


def test_a_manifest_of_another_release_may_say_more() -> None:
    board = Board()
    extra = {"control": ControlRecord(level=2, lr_scale=0.5).model_dump() | {"mood": "calm"}}
    assert board.controller().replay(extra) == Steering(lr_scale=0.5)
