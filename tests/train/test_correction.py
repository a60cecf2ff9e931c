"""The sign-guided correction in its place: clip, re-sign, step."""

from __future__ import annotations

import pytest
import torch

from sprawl.config import RunConfig
from sprawl.train.correction import correct_gradient
from sprawl.train.trainer import Trainer
from tests.train.helpers import make_batch, make_config, make_decoder

UNSIGNED = "model.layers.0.mlp.up_proj.weight"
CLIP = 0.01


def config(clip_norm: float, blend: float = 0.25) -> RunConfig:
    return make_config(
        optimizer={"lr": 1e-3, "clip_norm": clip_norm}, anchor={"blend": blend}, probe={"gradient_every": 0}
    )


def consumed(
    settings: RunConfig, signs: dict[str, torch.Tensor] | None
) -> tuple[dict[str, torch.Tensor], float | None]:
    """The gradients that the optimizer gets to see in a step, and the step's sign agreement."""
    trainer = Trainer(make_decoder(), make_decoder(), settings)
    seen: dict[str, torch.Tensor] = {}
    step = trainer.optimizer.step

    def watched() -> None:
        seen.update({n: p.grad.clone() for n, p in trainer.decoder.named_parameters() if p.grad is not None})
        step()

    trainer.optimizer.step = watched  # type: ignore[method-assign, assignment]
    stats = trainer.step(1, make_batch(), signs)
    return seen, stats.sign_agreement


def random_signs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {name: p.shape for name, p in make_decoder().named_parameters()}
    return {name: torch.rand(shape, generator=generator) < 0.5 for name, shape in shapes.items() if name != UNSIGNED}


@pytest.mark.parametrize("blend", [0.0, 0.25, 0.5, 1.0])
def test_the_optimizer_gets_the_clipped_gradient_re_signed(blend: float) -> None:
    raw, none = consumed(config(1e9), None)
    assert none is None
    signs = random_signs()
    found, agreement = consumed(config(CLIP, blend), signs)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in raw.values()]))
    assert norm > 10 * CLIP
    agreeing = nonzero = 0
    for name, gradient in raw.items():
        clipped = gradient * (CLIP / (norm + 1e-6))
        expected = clipped
        if name in signs:
            sign = torch.where(signs[name], 1.0, -1.0)
            expected = blend * clipped + (1 - blend) * clipped.abs() * sign
            agreeing += int((clipped.sign() == sign).sum())
            nonzero += int((clipped != 0).sum())
        assert torch.allclose(found[name], expected, rtol=1e-5, atol=1e-9), name
    assert agreement == agreeing / nonzero
    # Clipping afterwards would scale to the bound again what disagreeing signs have shortened.
    corrected = torch.linalg.vector_norm(torch.stack([g.norm() for g in found.values()]))
    assert corrected <= CLIP * (1 + 1e-5)
    if blend == 0.5:
        assert corrected < 0.9 * CLIP


def test_before_the_first_sign_map_the_clipped_gradient_is_used_as_it_is() -> None:
    plain, _ = consumed(config(CLIP), None)
    empty, agreement = consumed(config(CLIP), {})
    assert all(torch.equal(plain[name], empty[name]) for name in plain)
    assert agreement is not None
    assert agreement != agreement  # NaN: nothing was compared


def test_zero_gradients_stay_zero_and_a_zero_m_counts_as_plus() -> None:
    gradient = torch.tensor([0.0, -0.0, 3.0, -4.0])
    momentum = torch.tensor([1.0, -1.0, 0.0, -0.0])
    correct_gradient(gradient, momentum >= 0, 0.25)
    assert gradient.tolist() == [0.0, 0.0, 3.0, 2.0]  # 0.25 g + 0.75 |g|
