"""Decisions that a cloud which behaves would never ask for."""

from __future__ import annotations

from sprawl.board.fleet_log import FleetRecord, Order
from sprawl.board.records import IslandRecord
from sprawl.fleet.policy import Actions, View, decide, differs
from sprawl.fleet.port import Machine, Phase
from sprawl.fleet.settings import FleetSettings

NOW = 10_000.0
SETTINGS = FleetSettings(grow_cooldown_s=0, shrink_cooldown_s=0, island_hourly_cost=1.0)


def decided(*names: str, do: str = "run", since: float = 0.0, seen: bool = True, **more: object) -> FleetRecord:
    orders = {name: Order(do=do, since=since, seen=seen) for name in names}  # type: ignore[arg-type]
    record = FleetRecord(number=1, state="open", at=0, nonce="n", target=len(names), islands=orders, named=len(names))
    return record.model_copy(update=more)


def heartbeat(name: str, age: float = 1.0, state: str = "ready") -> IslandRecord:
    return IslandRecord.model_validate(
        {
            "island_id": name,
            "url": "http://x",
            "state": state,
            "applied": 1,
            "started_at": 0.0,
            "heartbeat_at": NOW - age,
            "interval_s": 2.0,
            "last_error": "root digest" if state == "failed" else None,
        }
    )


def machine(name: str, phase: Phase = "running", since: float = 0.0, hourly: float | None = None) -> Machine:
    return Machine(name, phase, since, hourly, "gcp/us-central1")


def look(record: FleetRecord, machines: list[Machine], islands: list[IslandRecord], target: int = 1) -> Actions:
    return decide(View(NOW, record, tuple(machines), tuple(islands)), target, "why", SETTINGS)


def test_all_is_well_and_nothing_is_written() -> None:
    record = decided("island-0")
    actions = look(record, [machine("island-0")], [heartbeat("island-0")])
    assert not differs(record, actions.decision)
    assert (actions.start, actions.drain, actions.cancel, actions.forget) == ([], [], [], [])


def test_a_machine_that_is_dearer_than_allowed_is_given_back_and_not_asked_for_at_once() -> None:
    record = decided("island-0")
    actions = look(record, [machine("island-0", hourly=2.5)], [heartbeat("island-0")])
    assert actions.cancel == ["island-0"]
    assert actions.start == []  # it would come again
    assert actions.decision.failures == 1
    assert "costs $2.50 an hour, island_hourly_cost is $1.00 (gcp/us-central1)" in actions.notes[0][1]
    assert look(record, [machine("island-0", hourly=1.0)], [heartbeat("island-0")]).cancel == []


def test_an_island_that_failed_is_replaced_at_once() -> None:
    record = decided("island-0")
    actions = look(record, [machine("island-0")], [heartbeat("island-0", state="failed")])
    assert (actions.cancel, actions.start, actions.forget) == (["island-0"], ["island-1"], ["island-0"])
    assert "it failed: root digest" in actions.notes[0][1]


def test_a_machine_that_came_back_after_a_preemption_gets_the_time_of_a_new_one() -> None:
    record = decided("island-0")
    silent = [heartbeat("island-0", age=900.0)]
    assert look(record, [machine("island-0", "recovering", since=NOW - 800)], silent).cancel == []
    assert look(record, [machine("island-0", "running", since=NOW - 300)], silent).cancel == []
    assert look(record, [machine("island-0", "running", since=NOW - 1300)], [heartbeat("island-0", 1400.0)]).cancel


def test_an_island_that_is_still_wanted_for_nothing_costs_nothing() -> None:
    """A job that waits for a machine is left alone, however long: another one would wait too."""
    record = decided("island-0", seen=False, since=0.0)
    assert look(record, [machine("island-0", "pending")], []).cancel == []


def test_one_that_was_never_there_is_cancelled_when_it_shows_up_after_all() -> None:
    shrunk = look(decided("island-0", "island-1", since=NOW - 10, seen=False), [], [], target=1)
    assert shrunk.decision.islands["island-1"].do == "drain"
    late = decided("island-1", do="drain", since=NOW - 200, seen=False)
    assert look(late, [machine("island-1", "pending")], [], target=0).cancel == ["island-1"]


def test_a_drain_is_asked_for_again_until_it_is_cancelled() -> None:
    for age, drained, cancelled in ((30.0, ["island-0"], []), (SETTINGS.drain_limit_s + 1, [], ["island-0"])):
        record = decided("island-0", do="drain", since=NOW - age)
        actions = look(record, [machine("island-0")], [heartbeat("island-0", age=60.0, state="draining")], target=0)
        assert (actions.drain, actions.cancel) == (drained, cancelled)
    gone = look(decided("island-0", do="drain", since=NOW - 5), [], [heartbeat("island-0")], target=0)
    assert gone.decision.islands == {}
    assert gone.forget == ["island-0"]
