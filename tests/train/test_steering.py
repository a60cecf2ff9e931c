"""What a step does when it is told to do otherwise than configured."""

from __future__ import annotations

import json

import pytest
import torch

from sprawl.train.optimizer import build_optimizer, scale_learning_rate
from sprawl.train.steering import AS_CONFIGURED, Steering
from sprawl.train.trainer import StepStats, Trainer
from tests.train.helpers import make_batch, make_config, make_decoder

Weights = dict[str, torch.Tensor]


def one_step(steering: Steering | None, signed: bool = True, **sections: object) -> tuple[Weights, StepStats]:
    """Weights after a first step, and what it measured."""
    trainer = Trainer(make_decoder(), make_decoder(), make_config(**sections))
    generator = torch.Generator().manual_seed(3)
    signs = {name: torch.rand(p.shape, generator=generator) < 0.5 for name, p in trainer.decoder.named_parameters()}
    arguments = () if steering is None else (steering,)
    stats = trainer.step(3, make_batch(), signs if signed else None, *arguments)
    return {name: p.detach().clone() for name, p in trainer.decoder.named_parameters()}, stats


def same(left: Weights, right: Weights) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_the_default_changes_no_bit() -> None:
    assert same(one_step(None)[0], one_step(Steering(**json.loads(json.dumps(AS_CONFIGURED.as_dict()))))[0])


def test_the_learning_rate_is_scaled_for_the_step_and_no_longer() -> None:
    before = dict(make_decoder().named_parameters())
    whole, half = one_step(None)[0], one_step(Steering(lr_scale=0.5))[0]
    assert same(half, one_step(None, optimizer={"lr": 5e-4})[0])
    for name, start in before.items():
        assert torch.allclose(half[name] - start, (whole[name] - start) / 2, atol=1e-6)
    trainer = Trainer(make_decoder(), make_decoder(), make_config())
    trainer.step(1, make_batch(), None, Steering(lr_scale=0.25))
    trainer.step(2, make_batch(), None)
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-3


def test_every_part_of_a_composed_optimizer_is_scaled() -> None:
    optimizer = build_optimizer(make_decoder(), make_config(optimizer={"lr": 1e-3, "kind": "muon"}).optimizer)
    scale_learning_rate(optimizer, 1e-3, 0.5)
    assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [5e-4, 5e-4]


@pytest.mark.parametrize(("strength", "blend"), [(1.0, 0.25), (0.5, 0.625), (0.0, 1.0)])
def test_strength_scales_the_weight_of_the_signs(strength: float, blend: float) -> None:
    steered = one_step(Steering(sign_strength=strength))[0]
    assert same(steered, one_step(None, anchor={"blend": blend})[0])


def test_without_strength_the_gradient_is_its_own_and_agreement_is_still_measured() -> None:
    steered, stats = one_step(Steering(sign_strength=0.0))
    assert same(steered, one_step(None, signed=False)[0])
    assert stats.sign_agreement == pytest.approx(0.5, abs=0.1)


def test_a_step_made_dense_is_a_dense_one() -> None:
    steered, stats = one_step(Steering(dense=True))
    assert same(steered, one_step(None, boundary={"codec": "dense"})[0])
    assert stats.dense_step
    assert stats.wire.sent == stats.wire.dense


def test_a_probe_is_made_when_it_is_wanted_and_changes_nothing() -> None:
    quiet, probed = one_step(None), one_step(Steering(probe=True))
    assert quiet[1].kl_dense is None
    assert probed[1].kl_dense is not None
    assert same(quiet[0], probed[0])
