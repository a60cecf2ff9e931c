"""Forecast, schedule and the dense replay."""

from __future__ import annotations

import torch

from sprawl.anchor.forecast import checkpoints_for, fire_due, replayed_step, secant
from sprawl.anchor.replay import fold, replay
from sprawl.config import AnchorConfig
from sprawl.train.trainer import Trainer
from tests.train.helpers import make_batch, make_config, make_decoder


def test_schedule_and_staleness_contract() -> None:
    config = AnchorConfig(every=20, lag=20)
    assert [step for step in range(101) if fire_due(step, 20)] == [20, 40, 60, 80, 100]
    assert checkpoints_for(20, config) == [0]
    assert checkpoints_for(40, config) == [20, 0]
    assert checkpoints_for(100, config) == [80, 60]
    for every, lag in ((10, 20), (20, 40), (5, 5)):
        other = AnchorConfig(every=every, lag=lag)
        for step in range(every, 200, every):
            assert all(used <= step - lag for used in checkpoints_for(step, other))
    assert checkpoints_for(40, AnchorConfig(forecast="stale")) == [20]
    assert checkpoints_for(40, AnchorConfig(replay="matching")) == [20]


def test_matching_replay_takes_what_the_stale_weights_sampled() -> None:
    config = AnchorConfig(replay="matching")
    assert replayed_step(40, config, staleness=0) == 21
    assert replayed_step(40, config, staleness=1) == 22
    assert replayed_step(40, AnchorConfig(), staleness=1) == 40


def test_secant_is_linear_extrapolation() -> None:
    newest, older = {"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([1.0, 2.0])}
    assert secant(newest, older, 1.0)["w"].tolist() == [5.0, 0.0]
    assert secant(newest, older, 0.5)["w"].tolist() == [4.0, 0.5]


def test_fold_is_the_moving_average() -> None:
    first = fold(None, {"w": torch.tensor([4.0])}, 0.25)
    assert first["w"].tolist() == [3.0]
    assert fold(first, {"w": torch.tensor([-8.0])}, 0.25)["w"].tolist() == [-5.25]  # 0.25 * 3 + 0.75 * -8


def test_replay_is_the_dense_gradient_and_steps_nothing() -> None:
    """The anchor's gradient equals that of a trainer without compression on the same weights and batch."""
    config, batch = make_config(boundary={"codec": "dense"}), make_batch()
    decoder = make_decoder()
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    result = replay(decoder, batch, config)
    assert all(torch.equal(before[name], p) for name, p in decoder.named_parameters())
    trainer = Trainer(make_decoder(), make_decoder(), config)
    stats = trainer.step(1, batch, None)
    assert abs(stats.grad_norm - result.grad_norm) < 1e-4 * stats.grad_norm
    assert set(result.gradients) == set(before)
