"""Every falsifier fires on what it is for, and is silent on a clean run."""

import math

import pytest

from sprawl.board.records import ControlRecord, Views, Wire
from sprawl.report.data import RunData
from sprawl.report.violations import find_violations, run_checks
from tests.report.plausible import (
    make_event,
    make_feed,
    make_fire,
    make_island,
    make_run,
    make_run_record,
    make_step,
    with_control,
)


def of(steps=(), fires=(), events=(), islands=(), overrides=()):
    return RunData.of(make_run_record(*overrides), steps, (), fires, events, islands)


def clean_steps(count=40):
    return [make_step(step) for step in range(1, count + 1)]


@pytest.mark.parametrize("arm", ["prf", "no_anchor", "dense"])
def test_clean_run_is_silent(arm):
    assert find_violations(make_run(arm)) == []


def test_fires_that_the_controller_brought_forward_are_counted_apart():
    data = with_control(make_run("prf", steps=60))
    assert [record.step for record in data.fires] == [20, 40, 50, 60]
    assert find_violations(data) == []


def test_every_check_applies_to_a_finished_run():
    assert [result.name for result in run_checks(make_run("prf")) if not result.applies] == ["stream"]


def test_fresh_run_has_little_to_check():
    results = run_checks(of())
    assert not any(result.violations for result in results)
    assert [result.name for result in results if result.applies] == ["fires", "events"]


CASES = {
    "missing step": (of([make_step(1), make_step(2), make_step(4)]), "missing from the ledger: 3"),
    "repeated step": (of([make_step(1), make_step(1)]), "more than once: 1"),
    "shifted version": (of([make_step(1, version=2)]), "published version is not their number: 1"),
    "refused": (of([make_step(1, applied=False)]), "refused for a non-finite gradient: 1"),
    "ratio": (of([make_step(1, ratio_max_error=2e-5)]), "PPO ratio off 1"),
    "ratio nan": (of([make_step(1, ratio_max_error=math.nan)]), "PPO ratio off 1"),
    "stale": (of([make_step(1, staleness_max=2)]), "max_staleness=1"),
    "stale stream": (of([make_step(1, staleness_max=2, feed=make_feed(0, 1))]), "max_staleness=1"),
    "trained twice": (
        of([make_step(1, feed=make_feed(4, 5)), make_step(2, feed=make_feed(6, 4))]),
        "groups trained more than once, by the numbers of their prompts: 4",
    ),
    "lag": (of(clean_steps(), [make_fire(40, newest_step=21)]), "used weights of step 21, newer than 20"),
    "older checkpoint newer": (
        of(clean_steps(), [make_fire(20, checkpoints=[10, 0])]),
        "used weights of step 10, newer than 0",
    ),
    "matching": (
        of(clean_steps(), [make_fire(20, replayed_versions=[0, 1])], overrides=["anchor.replay=matching"]),
        "rollouts of versions [0, 1], not of the weights it held (0)",
    ),
    "optimizer": (of(clean_steps(), [make_fire(20, optimizer_steps=1)]), "stepped an optimizer 1 times"),
    "weights moved": (
        of(clean_steps(), [make_fire(20, weights_before="ab", weights_after="cd")]),
        "replay changed the weights it ran at: 20",
    ),
    "other parameters": (
        of(clean_steps(), [make_fire(20, parameters=8, bytes=121)]),
        "is of 8 parameters, the run has",
    ),
    "sign received": (
        of([*clean_steps(20), make_step(21, sign_fire=20, sign_age=1, sign=Wire(sent=7, dense=8))], [make_fire(20)]),
        "received another sign map than their fire sent: 21",
    ),
    "sign unknown": (of([make_step(1, sign_fire=20, sign_age=1)]), "by a fire that is not on the ledger: 1"),
    "sign age": (
        of([*clean_steps(20), make_step(21, sign_fire=20, sign_age=2)], [make_fire(20)]),
        "record a wrong age of their sign map: 21",
    ),
    "weights age": (
        of([*clean_steps(20), make_step(21, sign_fire=20, sign_age=1, sign_weights_age=1)], [make_fire(20)]),
        "record a wrong age of their sign map: 21",
    ),
    "not waited for": (
        of(clean_steps(21), [make_fire(20)], overrides=["anchor.blocking=true"]),
        "went on without the due fire although anchor.blocking is true: 21",
    ),
    "sign size": (of(clean_steps(), [make_fire(20, bytes=262_745)]), "sign map of step 20 has 262745 bytes"),
    "uneven fire": (of(clean_steps(), [make_fire(21)]), "no multiple of c=20: 21"),
    "repeated fire": (of(clean_steps(), [make_fire(20), make_fire(20)]), "fires recorded more than once: 20"),
    "too many fires": (of(clean_steps(19), [make_fire(20)]), "1 fires, expected floor(19/20) = 0"),
    "extra fire off": (of(clean_steps(), [make_fire(30, kind="extra")]), "although control.enabled is false: 30"),
    "extra fire unasked": (
        of(clean_steps(), [make_fire(30, kind="extra")], overrides=["control.enabled=true"]),
        "that no step asked for: 30",
    ),
    "regular fire as extra": (
        of(clean_steps(), [make_fire(20), make_fire(40, kind="extra")], overrides=["control.enabled=true"]),
        "recorded as brought forward: 40",
    ),
    "extra fire as regular": (of(clean_steps(), [make_fire(20), make_fire(30)]), "no multiple of c=20: 30"),
    "fires off": (of(clean_steps(), [make_fire(20)], overrides=["anchor.enabled=false"]), "anchor.enabled is false"),
    "heartbeat": (of(islands=[make_island("a", versions_verified=100)]), "island a verified 100 of the 101"),
    "report": (
        of(events=[make_event("island_report", 1, island_id="b", versions_applied=3, versions_verified=2)]),
        "island b verified 2 of the 3",
    ),
    "verify": (of(events=[make_event("verify", 1, checked=2, problems=["version 1: root differs"])]), "root differs"),
    "event": (of(events=[make_event("violation", 7, "replay gave other bits")]), "step 7: replay gave other bits"),
}


@pytest.mark.parametrize("name", CASES)
def test_violation_is_found_once(name):
    data, message = CASES[name]
    found = find_violations(data)
    assert len([violation for violation in found if message in violation]) == 1, found


def test_missing_fire_counts_only_when_the_run_is_finished():
    steps, fires = clean_steps(40), [make_fire(20)]
    assert find_violations(of(steps, fires)) == []
    assert find_violations(of(steps, fires), finished=True) == ["1 fires, expected floor(40/20) = 2"]
    assert find_violations(of(steps, fires, [make_event("finish", 40)])) == ["1 fires, expected floor(40/20) = 2"]


def test_extra_fires_are_counted_apart():
    steps, on = [*clean_steps(39), make_step(40, control=ControlRecord(level=1, fire=33))], ["control.enabled=true"]
    extra = make_fire(33, kind="extra", newest_step=13)
    assert find_violations(of(steps, [make_fire(20), extra, make_fire(40)], overrides=on), finished=True) == []
    assert find_violations(of(steps, [make_fire(20), extra], overrides=on), finished=True) == [
        "1 fires (and 1 extra), expected floor(40/20) = 2"
    ]
    newer = make_fire(33, kind="extra", newest_step=14)
    assert find_violations(of(steps, [newer, make_fire(20)], overrides=on)) == [
        "fire at step 33 used weights of step 14, newer than 13 (t-K)"
    ]


def test_the_base_model_is_old_enough_for_the_first_fires():
    fires = [make_fire(10, newest_step=0, checkpoints=[0]), make_fire(20, newest_step=0, checkpoints=[0])]
    assert find_violations(of(clean_steps(20), fires, overrides=["anchor.every=10"]), finished=True) == []


def test_ratio_may_leave_1_with_more_inner_epochs():
    assert find_violations(of([make_step(1, ratio_max_error=0.1)], overrides=["grpo.epochs=2"])) == []


def test_only_the_newest_verification_counts():
    events = [make_event("verify", 1, problems=["bad"]), make_event("verify", 2, problems=[])]
    assert find_violations(of(events=events)) == []


def test_a_violation_both_seen_and_reported_is_told_once():
    events = [make_event("violation", 3, "steps refused for a non-finite gradient: 1")]
    assert len(find_violations(of([make_step(1, applied=False)], events=events))) == 1


def test_many_steps_make_one_short_line():
    (violation,) = find_violations(of([make_step(i, applied=False) for i in range(1, 501)]))
    assert violation.endswith("... (500 in all)")
    assert len(violation) < 120


def test_probe_views_do_not_matter_to_the_checks():
    assert find_violations(of([make_step(1, entropy=Views(compression=math.nan))])) == []
