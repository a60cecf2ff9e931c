"""Numbers of a study: what is cut, what is averaged, and the rule by which a run has collapsed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sprawl.report.data import RunData
from sprawl.study.config import MilestonesConfig
from sprawl.study.measures import (
    Spread,
    Verdict,
    arm_measures,
    arm_runs,
    below_base,
    collapsed_at,
    first_steps,
    seconds_at,
    verdict,
)
from sprawl.study.plan import plan_cells
from sprawl.study.staleness import milestones, reward_after, reward_at_step, seconds_to, steps_to
from sprawl.study.table import arms_table, cell, staleness_table
from tests.report.plausible import make_evaluation, make_event, make_run_record, make_step
from tests.study.support import ledger, make_study


def run_of(rewards: list[float], seconds: float = 2.0, **more) -> RunData:
    steps = [make_step(i, reward=reward, seconds={"total": seconds}) for i, reward in enumerate(rewards, 1)]
    return RunData.of(make_run_record(steps=len(rewards)), steps, **more)


def test_a_collapse_is_half_of_the_best_mean_before():
    assert collapsed_at([0.8] * 20 + [0.41] * 200) is None
    assert collapsed_at([1.0] * 20 + [0.0] * 30) == 30, "ten zeros leave exactly half, eleven less"
    assert collapsed_at([0.0] * 100) is None, "what never learned did not collapse"
    assert collapsed_at([1.0] * 10 + [0.0] * 9) is None, "shorter than the window"


def test_verdicts():
    assert verdict(run_of([0.5] * 40), 40) == Verdict("healthy")
    assert verdict(run_of([0.5] * 30 + [0.0] * 30), 60) == Verdict("collapsed", 41)
    assert verdict(run_of([0.5] * 30 + [0.0] * 30), 30) == Verdict("healthy"), "the collapse comes later"
    assert verdict(run_of([0.5] * 10), 40) == Verdict("unfinished", 10)
    assert verdict(run_of([0.5] * 10, events=[make_event("verdict", 10)]), 40) == Verdict("stopped", 10)
    assert verdict(run_of([0.5] * 10, events=[make_event("violation", 11)]), 40) == Verdict("stopped", 10)
    replayed = run_of([0.5] * 10, events=[make_event("violation", 10)])
    assert verdict(replayed, 40) == Verdict("unfinished", 10), "a replay that differed is no end"
    worse = run_of([0.5] * 40, evaluations=[make_evaluation(0, 0.5), make_evaluation(40, 0.2)])
    assert verdict(worse, 40) == Verdict("collapsed", 40)


def test_below_the_base_model_needs_more_than_chance():
    assert not below_base([make_evaluation(0, 0.115), make_evaluation(40, 0.105)])
    assert below_base([make_evaluation(0, 0.115), make_evaluation(40, 0.0)])
    assert not below_base([make_evaluation(40, 0.0)])


def test_a_cut_run_is_as_it_was_then():
    whole = ledger(plan_cells(make_study(), only=["prf-anchor"])[0])
    cut = first_steps(whole, 40)
    assert (cut.last_step, cut.evaluations[-1].step, len(cut.fires), cut.finished) == (40, 30, 2, False)
    assert first_steps(whole, 60) == whole
    assert whole.finished


def test_only_runs_that_got_there_are_averaged():
    study = make_study()
    cells = plan_cells(study, only=["prf"])
    known = {cells[0].run_id: ledger(cells[0]), cells[1].run_id: ledger(cells[1], steps=25)}
    runs = arm_runs(study, cells[0].arm, cells, known, 40)
    assert runs.seeds == (7, 8)
    assert [data.run.run_id for data in runs.complete] == ["three-prf-s7"]
    rewards = [record.reward for record in known[cells[0].run_id].steps]
    assert arm_measures(runs)["reward_first10"].values == (pytest.approx(sum(rewards[:10]) / 10),)
    assert runs.verdicts() == {7: Verdict("healthy"), 8: Verdict("unfinished", 25)}
    line = arms_table([runs]).splitlines()[2]
    assert line.startswith("| prf | 1 | 40 | ")
    assert "no; 1 unfinished" in line


def test_spreads():
    assert Spread((1.0, None, 4.0)).as_dict() == {"mean": 2.5, "min": 1.0, "max": 4.0, "values": [1.0, None, 4.0]}
    assert Spread((float("nan"),)).as_dict() == {"mean": None, "min": None, "max": None, "values": [None]}
    assert cell(Spread((0.5, 0.7, 0.6))) == "0.6 (0.5–0.7)"
    assert cell(Spread((0.5,))) == "0.5"
    assert cell(Spread((0.5, None))) == "0.5, 1 of 2"
    assert cell(Spread(())) == "–"


def test_rewards_by_step_and_by_second():
    data = run_of([0.0] * 20 + [1.0] * 20, seconds=3.0)
    assert reward_at_step(data, 20) == 0.0
    assert reward_at_step(data, 25) == 0.5
    assert reward_at_step(data, 50) is None
    assert reward_after(data, 75.0) == 0.5, "25 steps of 3 s"
    assert reward_after(data, 1.0) is None
    assert (steps_to(data, 0.5), seconds_to(data, 0.5)) == (25, 75.0)
    assert (steps_to(data, 0.1), seconds_to(data, 0.1)) == (21, 63.0)
    slow = replace(data, steps=data.steps[:22])
    assert (steps_to(slow, 0.5), seconds_to(slow, 0.5)) == (None, None)
    assert seconds_at(slow)[-1] == 66.0


def test_staleness_table_has_every_milestone():
    study = make_study()
    cells = plan_cells(study)
    known = {entry.run_id: ledger(entry) for entry in cells}
    arms = [arm_runs(study, arm, cells, known, 40) for arm in study.all_arms()]
    at = milestones(MilestonesConfig(steps=[10, 40, 100], rewards=[0.45, 2 / 3]), arms)
    assert at.steps == (10, 40), "no arm has 100 steps"
    quickest = min(seconds_at(data)[-1] for runs in arms for data in runs.complete)
    assert at.seconds == (quickest / 2, quickest)
    lines = staleness_table(arms, at).splitlines()
    assert len({line.count("|") for line in lines[:5]}) == 1
    assert "reward at step 40" in lines[0]
    assert "seconds (steps) to 0.45" in lines[0]
    assert " 2 of 2" not in lines[2]
    assert milestones(MilestonesConfig(seconds=[5.0]), arms).seconds == (5.0,)
