"""The dense replay and the moving average."""

from __future__ import annotations

import torch

from sprawl.anchor.replay import fold, replay
from sprawl.train.trainer import Trainer
from tests.train.helpers import make_batch, make_config, make_decoder


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
