"""Seconds from short runs of their own: which are planned, and what they replace."""

from __future__ import annotations

import math

import pytest

from sprawl.errors import ConfigError
from sprawl.report.data import RunData
from sprawl.study.measures import arm_runs, seconds_at
from sprawl.study.plan import plan_cells, plan_timing
from sprawl.study.results import make_results
from sprawl.study.timing import pace, with_measured_seconds
from tests.report.plausible import make_event, make_run_record, make_step
from tests.study.support import ledger, make_study

TIMED = {"timing": {"steps": 6}, "tables": ["arms", "staleness"]}


def short(run_id: str, seconds: list[float], planned: int = 6) -> RunData:
    steps = [make_step(step, seconds={"total": total}) for step, total in enumerate(seconds, 1)]
    events = [make_event("finish", planned)] if len(seconds) == planned else []
    return RunData.of(make_run_record(steps=planned, run_id=run_id), steps, events=events)


def test_every_arm_has_one_short_run_under_a_name_of_its_own():
    study = make_study(**TIMED)
    cells = plan_timing(study)
    assert [cell.run_id for cell in cells] == [f"three-timing-{arm}-s7" for arm in ("prf-anchor", "prf", "dense")]
    assert {(cell.config.steps, cell.config.evaluate.every) for cell in cells} == {(6, 6)}
    assert cells[2].config.boundary.codec == "dense"
    assert [cell.run_id for cell in plan_timing(study, only=["d*"])] == ["three-timing-dense-s7"]
    assert plan_timing(make_study()) == []
    assert plan_timing(study, quick=True) == [], "a check of the study measures nothing"
    with pytest.raises(ConfigError, match=r"timing\.steps"):
        make_study(timing={"steps": 3})
    with pytest.raises(ConfigError, match=r"timing\.free names 'grpo\.offpolicy\.kind', which no arm changes"):
        make_study(timing={"free": ["grpo.offpolicy.kind"]})


def test_the_second_half_counts_and_a_run_that_did_not_finish_does_not():
    assert pace(short("a", [90.0, 40.0, 3.0, 2.0, 1.0, 2.5])) == 2.0
    assert math.isnan(pace(short("a", [1.0, 1.0, 1.0], planned=6)))


def test_measured_seconds_take_the_place_of_those_of_busy_runs():
    study = make_study(**TIMED)
    cells, timing = plan_cells(study), plan_timing(study)
    known = {cell.run_id: ledger(cell) for cell in cells}
    known |= {cell.run_id: short(cell.run_id, [9.0, 9.0, 9.0, 1.5, 1.5, 1.5]) for cell in timing[:2]}
    timed = with_measured_seconds(study, known, cells, timing)
    arms = {arm.name: arm_runs(study, arm, cells, timed, 40) for arm in study.all_arms()}
    assert {seconds_at(data)[-1] for data in arms["prf"].complete} == {60.0}
    assert {data.steps[0].reward for data in arms["prf"].runs} == {
        known[cell.run_id].steps[0].reward for cell in cells if cell.arm.name == "prf"
    }
    assert math.isnan(seconds_at(arms["dense"].complete[0])[-1]), "never its own beside measured ones"
    found = make_results(study, cells, timed, quick=False).data
    measures = {row["arm"]: row["measures"]["seconds_per_step"]["mean"] for row in found["arms"]}
    assert measures == {"prf-anchor": 1.5, "prf": 1.5, "dense": None}, "and the short runs are no arms"
    assert found["milestones"]["seconds"] == (30.0, 60.0)
    assert found["staleness"]["dense"]["reward_after_60s"]["mean"] is None


def test_before_the_short_runs_there_are_no_seconds_to_compare_at():
    study = make_study(**TIMED, groups=[])
    cells = plan_cells(study)
    known = with_measured_seconds(study, {cells[0].run_id: ledger(cells[0])}, cells, plan_timing(study))
    found = make_results(study, cells, known, quick=False)
    assert found.data["milestones"]["seconds"] == ()
    assert "reward after" not in found.tables["staleness"]


def test_without_short_runs_in_the_study_runs_keep_their_own():
    study = make_study()
    cells = plan_cells(study)
    known = {cells[0].run_id: ledger(cells[0])}
    assert with_measured_seconds(study, known, cells, []) == known


def test_arms_that_cost_the_same_share_a_short_run():
    arms = [
        {"name": "plain"},
        {"name": "wide", "overrides": {"grpo.clip_high": 0.4}},
        {"name": "dense", "overrides": {"boundary.codec": "dense", "anchor.enabled": False}},
    ]
    study = make_study(arms=arms, timing={"steps": 6, "free": ["grpo.clip_high"]})
    timing = plan_timing(study, only=["wide"])
    assert [cell.run_id for cell in timing] == ["three-timing-plain-s7"]
    assert [cell.run_id for cell in plan_timing(study)] == ["three-timing-plain-s7", "three-timing-dense-s7"]
    cells = plan_cells(study, only=["wide"], seeds=[7])
    steps = [make_step(step, seconds={"total": 9.0}) for step in range(1, 11)]
    known = {cells[0].run_id: RunData.of(make_run_record(steps=10, run_id=cells[0].run_id), steps)}
    known[timing[0].run_id] = short(timing[0].run_id, [2.0] * 6)
    timed = with_measured_seconds(study, known, cells, timing)
    assert seconds_at(timed[cells[0].run_id])[-1] == 20.0
