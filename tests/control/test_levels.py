"""The controller played over runs that are quiet, drift, recover, relapse or are lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from sprawl.board.records import ControlRecord
from sprawl.config_control import ControlConfig
from sprawl.control.levels import sign_strength
from sprawl.control.verdict import remedy
from sprawl.train.steering import AS_CONFIGURED
from tests.control.series import CIRCUIT, ON, levels, play, seen


@pytest.mark.parametrize("seed", range(8))
def test_stationary_mismatch_is_left_alone_however_noisy(seed: int) -> None:
    decisions = play(150, seed=seed)
    assert levels(decisions) == [0]
    assert all((d.sign_strength, d.lr_scale, d.dense, d.probe, d.fire) == (1, 1, False, False, None) for d in decisions)
    assert {d.verdict for d in decisions} == {None}


def test_a_learning_run_whose_reward_and_kl_rise_is_left_alone() -> None:
    assert levels(play(150, lambda step, _: {"reward": step / 150, "kl_dense": 0.004 * step})) == [0]


def rising(step: int, control: ControlRecord) -> dict[str, Any]:
    return {"mismatch": 4.3 * 1.02 ** max(0, step - 40) + 0.05 * (step % 3)}


def test_rising_mismatch_escalates_level_by_level_and_is_stopped() -> None:
    decisions = play(300, rising)
    assert levels(decisions) == [0, 1, 2, 3, 4]
    first = {level: next(d for d in decisions if d.level == level) for level in range(1, 5)}
    assert [first[level].lr_scale for level in range(1, 5)] == [1.0, 0.5, 0.25, 0.125]
    assert not any(d.dense for d in decisions if d.level < 3)
    assert any(d.dense for d in decisions if d.level == 3)
    assert all(d.fire is None or d.fire % 20 == 10 for d in decisions)
    assert any(d.fire for d in decisions)
    starts = [first[level].since for level in range(1, 5)]
    # A trend needs eight points under the level that it judges.
    assert all(later - earlier >= 8 for earlier, later in pairwise(starts))
    last = decisions[-1]
    assert last.verdict is not None
    assert "the mismatch rises by" in last.verdict
    assert "the best mean reward" in last.verdict
    assert "prf" in remedy(last.symptoms)
    assert len(decisions) - last.since >= ON.stop_after


def test_without_a_stop_the_last_level_is_held() -> None:
    decisions = play(300, rising, ON.model_copy(update={"stop_after": 0}))
    assert len(decisions) == 300
    assert decisions[-1].level == 4


def drift(limit: float) -> Any:
    """The dense view moves as fast as the learning rate lets it, until `limit` steps."""

    def changes(step: int, control: ControlRecord) -> dict[str, Any]:
        probed = step % 5 == 0 or control.probe
        speed = 0.03 * control.lr_scale if 50 <= step < limit else 0.003
        return {"mismatch_dense": speed if probed else None}

    return changes


def test_what_a_level_cures_is_not_escalated_and_is_given_up_after_calm_steps() -> None:
    decisions = play(130, drift(limit=75))
    assert levels(decisions) == [0, 1, 2, 1, 0]
    assert decisions[50].level == 1  # step 51: the first decision after the probe of step 50
    down = next(d for d in decisions if d.level == 1 and d.since > 60)
    assert all(d.level == 2 for d in decisions[down.since - 1 - ON.calm : down.since - 1])


def test_between_the_limit_and_half_of_it_nothing_moves() -> None:
    decisions = play(150, lambda step, c: {"mismatch_dense": 0.021 if step == 50 else 0.015 if step > 50 else 0.003})
    assert levels(decisions) == [0, 1]
    assert decisions[-1].quiet == 0


def test_every_relapse_doubles_the_calm_that_is_asked_for() -> None:
    spikes = {50, 90}
    decisions = play(220, lambda step, c: {"mismatch_dense": 0.025 if step in spikes else 0.003})
    assert levels(decisions) == [0, 1, 0, 1, 0]
    spells = [sum(d.level == 1 for d in decisions[a:b]) for a, b in ((0, 80), (80, 220))]
    assert spells[0] == pytest.approx(ON.calm, abs=2)
    assert spells[1] == pytest.approx(2 * ON.calm, abs=2)
    assert decisions[-1].relapses == 1


def test_a_severe_symptom_does_not_wait() -> None:
    decisions = play(60, lambda step, c: {"mismatch_dense": 0.2 if step >= 50 else 0.003})
    assert [d.level for d in decisions[49:55]] == [0, 2, 2, 3, 3, 4]


def test_fallen_reward_is_damage_and_recovery_is_not_stopped() -> None:
    def lost(step: int, control: ControlRecord) -> dict[str, Any]:
        return {"reward": 0.6 + 0.02 * (step % 3) if step < 60 else 0.1 + 0.02 * (step % 3)}

    decisions = play(300, lost)
    assert decisions[-1].verdict is not None
    assert "the reward fell from 0.6" in decisions[-1].verdict
    assert remedy(decisions[-1].symptoms) == "lower optimizer.lr"

    def recovering(step: int, control: ControlRecord) -> dict[str, Any]:
        return {"reward": 0.6 if step < 60 else min(0.55, 0.1 + 0.004 * (step - 60))}

    assert play(200, recovering)[-1].verdict is None


def test_entropy_is_watched_through_a_codec_only() -> None:
    def falling(step: int, control: ControlRecord) -> dict[str, Any]:
        return {"entropy": max(0.2, 1.85 - 0.03 * max(0, step - 40))}

    assert max(d.level for d in play(120, falling)) == 4
    assert any("entropy" in d.symptoms for d in play(120, falling))


def test_a_sign_map_that_points_away_or_never_comes_is_a_symptom() -> None:
    away = play(60, lambda step, c: {"dense_sign_agreement": 0.44} if step == 45 else {})
    assert away[45].level == 1
    assert "44%" in away[45].symptoms["sign"]
    assert away[45].sign_strength == 0.0  # it is measured below chance
    assert away[60 - 1].level == 1

    late = play(80, lambda step, c: {"sign_age": step - 20, "sign_fire": 20} if step > 20 else {})
    first = next(index for index, d in enumerate(late) if d.level)
    assert "stale" in late[first].symptoms


def test_strength_falls_with_age_and_with_measured_agreement() -> None:
    import random

    history = [seen(44, random.Random(0), dense_sign_agreement=None)]
    strengths = [sign_strength(age, history, ON, CIRCUIT) for age in (1, 5, 10, 15, 20, 35)]
    assert strengths == pytest.approx([1, 1, 2 / 3, 1 / 3, 0, 0])
    assert sign_strength(None, history, ON, CIRCUIT) == 1.0
    floored = ON.model_copy(update={"sign_floor": 0.2})
    assert sign_strength(20, history, floored, CIRCUIT) == 0.2
    probed = [seen(44, random.Random(0), dense_sign_agreement=0.55)]
    assert sign_strength(5, probed, ON, CIRCUIT) == pytest.approx(0.5)
    # The agreement was measured with another map: it says nothing about this one.
    other = [*probed, seen(61, random.Random(0), sign_fire=60)]
    assert sign_strength(1, other, ON, CIRCUIT) == 1.0
    # A new map came for this very step: what was measured with the one before says nothing either.
    assert sign_strength(1, [seen(60, random.Random(0), dense_sign_agreement=0.4)], ON, CIRCUIT) == 1.0


def test_decisions_are_a_function_of_what_is_written_down() -> None:
    """The record survives JSON, so a decision made after a resume is the same."""
    for decision in play(300, rising):
        assert ControlRecord.model_validate_json(decision.model_dump_json()) == decision
    assert ControlConfig().enabled is False
    assert ControlRecord().sign_strength == AS_CONFIGURED.sign_strength == 1.0
