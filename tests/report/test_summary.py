import json
import math

import pytest

from sprawl.board.records import GradientViews, Views, Wire
from sprawl.report.data import RunData
from sprawl.report.summary import summarise, summarise_data
from tests.report.plausible import (
    FULL,
    PARAMETERS,
    T0,
    make_evaluation,
    make_event,
    make_fire,
    make_island,
    make_run,
    make_run_record,
    make_step,
)

REQUIRED = {
    "run_id",
    "steps",
    "reward_first10",
    "reward_last20",
    "greedy_accuracy",
    "fires",
    "anchor_newest_step_lag_min",
    "mismatch_first",
    "mismatch_last",
    "boundary_bytes_ratio",
    "delta_bytes_ratio",
    "changed_share_mean",
    "versions_published",
    "versions_verified",
    "seconds_per_step",
    "islands",
    "violations",
}


def four_steps():
    return [
        make_step(
            step,
            reward=step / 10,
            mismatch=4.0 + 0.5 * step,
            boundary=Wire(sent=10 * step, dense=200),
            delta=Wire(sent=100, dense=1000) if step < 4 else Wire(sent=900, dense=1000),
            kind="keyframe" if step == 4 else "delta",
            sign=Wire(sent=5, dense=160) if step == 3 else Wire(sent=0, dense=0),
            changed_share=0.01 * step,
            grad_norm=[1.0, 9.0, 2.0, 4.0][step - 1],
            entropy=Views(compression=1.0 + step, dense=0.5 if step == 2 else None),
            staleness=step % 2,
            seconds={"total": [1.0, 1.0, 2.0, 7.0][step - 1]},
            islands={"a": 3, f"spare-{step % 2}": 1},
        )
        for step in (1, 2, 3, 4)
    ]


def test_arithmetic_by_hand():
    summary = summarise(
        make_run_record(steps=4),
        list(reversed(four_steps())),
        [make_evaluation(4, 0.75), make_evaluation(0, 0.25)],
        [make_fire(40, newest_step=15), make_fire(20, newest_step=0)],
        [
            make_event("verify", 2, checked=3),
            make_event("verify", 4, checked=5, problems=[]),
            make_event("resume", 2),
            make_event("finish", 4),
        ],
        [make_island("b")],
    )
    assert summary["steps"] == 4
    assert summary["reward_first10"] == pytest.approx(0.25)
    assert summary["greedy_accuracy"] == 0.75
    assert summary["accuracy_by_version"] == {"0": 0.25, "4": 0.75}
    assert summary["fires"] == 2
    assert summary["anchor_newest_step_lag_min"] == 20
    assert summary["mismatch_slope"] == pytest.approx(0.5)
    assert summary["mismatch_first"] == pytest.approx(5.25)
    assert summary["boundary_bytes_ratio"] == pytest.approx(100 / 800)
    assert summary["delta_bytes_ratio"] == pytest.approx(1200 / 4000)
    assert summary["delta_bytes_ratio_without_keyframes"] == pytest.approx(0.1)
    assert summary["sign_bytes_ratio"] == pytest.approx(1 / 32)
    assert summary["changed_share_mean"] == pytest.approx(0.025)
    assert summary["versions_published"] == 5
    assert summary["versions_verified"] == 5
    assert summary["seconds_per_step"] == 1.5
    assert summary["training_seconds"] == 11.0
    assert summary["wall_seconds"] == make_fire(40).finished_at - T0
    assert summary["grad_norm_median"] == 3.0
    assert summary["entropy"] == {"compression": {"first": 3.5, "last": 3.5}, "dense": {"first": 0.5, "last": 0.5}}
    assert summary["staleness_mean"] == 0.5
    assert summary["islands"] == 4  # a, spare-0, spare-1 sampled; b is registered
    assert summary["resumed"] == 1
    assert summary["finished"] is True


def test_first_and_last_windows():
    steps = [make_step(step, reward=step / 100, mismatch=float(step)) for step in range(1, 101)]
    summary = summarise(make_run_record(), steps, [], [], [], [])
    assert summary["reward_first10"] == pytest.approx(0.055)
    assert summary["reward_last20"] == pytest.approx(0.905)
    assert summary["mismatch_first"] == pytest.approx(5.5)
    assert summary["mismatch_last"] == pytest.approx(90.5)


def test_gradient_probes_and_what_goes_with_them():
    probe = GradientViews(
        cosine=0.1, norm_ratio=30.0, sign_agreement=0.52, corrected_cosine=0.4, dense_sign_agreement=None
    )
    steps = [
        make_step(1, gradient=probe, probe_bytes=1000, truncated_share=0.25),
        make_step(2, dense_step=True, off_policy_cut=0.5, groups_sampled=24),
        make_step(3, gradient=probe.model_copy(update={"cosine": 0.3}), probe_bytes=1000),
    ]
    summary = summarise(make_run_record(), steps, [], [], [], [])
    assert summary["gradient_probe"]["cosine"]["first"] == pytest.approx(0.2)
    assert summary["gradient_probe"]["norm_ratio"]["last"] == 30.0
    assert summary["gradient_probe"]["dense_sign_agreement"] == {"first": None, "last": None}
    assert (summary["dense_steps"], summary["probe_bytes"], summary["groups_sampled"]) == (1, 2000, 16 + 24 + 16)
    assert (summary["off_policy_cut_mean"], summary["truncated_share_mean"]) == (0.5, 0.25)


def test_nothing_known_yet():
    summary = summarise(make_run_record(), [], [], [], [], [])
    assert summary.keys() >= REQUIRED
    assert summary["steps"] == summary["fires"] == summary["versions_published"] == summary["islands"] == 0
    for key in ("reward_first10", "greedy_accuracy", "mismatch_slope", "boundary_bytes_ratio", "versions_verified"):
        assert summary[key] is None
    assert summary["anchor_newest_step_lag_min"] is None
    assert summary["violations"] == []
    assert summary["finished"] is False


def test_single_stage_run_has_no_boundary_ratio():
    summary = summarise(make_run_record(), [make_step(1, boundary=Wire(sent=0, dense=0))], [], [], [], [])
    assert summary["boundary_bytes_ratio"] is None


def test_plausible_run_is_valid_json_and_clean():
    summary = json.loads(json.dumps(summarise_data(make_run()), allow_nan=False))
    assert summary.keys() >= REQUIRED
    assert summary["violations"] == []
    assert summary["config"]["boundary.codec"] == "prf"
    assert summary["parameters"] == PARAMETERS
    assert summary["delta_bytes_ratio_without_keyframes"] < 0.12 < summary["delta_bytes_ratio"] < 0.2


def test_refused_step_keeps_the_json_finite():
    bad = make_step(2, applied=False, grad_norm=math.nan, loss=math.inf, mismatch=math.nan)
    summary = summarise(make_run_record(), [make_step(1), bad, make_step(3)], [], [], [], [])
    json.dumps(summary, allow_nan=False)
    assert summary["refused_steps"] == 1
    assert summary["mismatch_last"] == pytest.approx(4.3)


def test_finished_means_no_step_came_after():
    run, finish = make_run_record(), make_event("finish", 2)
    assert RunData.of(run, [make_step(1), make_step(2)], events=[finish]).finished
    assert not RunData.of(run, [make_step(i) for i in (1, 2, 3)], events=[finish]).finished


def test_state_follows_the_newest_sign_of_life():
    data = RunData.of(make_run_record(), [make_step(1, finished_at=T0 + 100)], islands=[])
    assert data.state(T0 + 120) == "running"
    assert data.state(T0 + 1000) == "stopped"
    assert make_run().state(T0 + 1e6) == "finished"
    slow = RunData.of(make_run_record(), [make_step(1, finished_at=T0 + 100, seconds={"total": 400.0})])
    assert slow.state(T0 + 1000) == "running"


def test_full_view_is_what_the_ratio_divides_by():
    step = make_step(1, delta=Wire(sent=FULL // 4, dense=FULL))
    assert summarise(make_run_record(), [step], [], [], [], [])["delta_bytes_ratio"] == pytest.approx(0.25, rel=1e-5)


def test_dense_steps_of_a_compressed_run_say_nothing_about_its_codec():
    steps = [
        make_step(i, mismatch=0.001, dense_step=True, entropy=Views(compression=0.1))
        if i % 3 == 0
        else make_step(i, mismatch=4.0, entropy=Views(compression=1.8))
        for i in range(1, 31)
    ]
    summary = summarise_data(RunData.of(make_run_record(), steps))
    assert (summary["mismatch_first"], summary["mismatch_last"], summary["mismatch_slope"]) == (4.0, 4.0, 0.0)
    assert summary["entropy"]["compression"]["last"] == pytest.approx(1.8)
    dense = RunData.of(make_run_record("boundary.codec=dense", "anchor.enabled=false"), steps)
    assert dense.codec_steps == dense.steps
    always = RunData.of(make_run_record(), [record for record in steps if record.dense_step])
    assert always.codec_steps == always.steps, "there is nothing else to show"
