"""The fast circuit's sign-guided correction (status report, section 1.3).

    G = blend * G_comp + (1 - blend) * |G_comp| * sign(M)

The magnitude stays the compressed gradient's own; the anchor decides most of the sign. sign(0) is +1 (`signmap`).

The order of a step: the whole model's gradient norm is measured, the gradient clipped to `optimizer.clip_norm`, then
re-signed, then given to the optimizer. No element is larger after the correction than before, so the norm of what the
optimizer sees is at most the clip, and less where signs disagree; nothing scales it up again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Agreement:
    """How many non-zero gradient elements there were, and how many had M's sign, before the correction."""

    agreeing: int
    nonzero: int

    @property
    def share(self) -> float:
        """nan when there are none."""
        return self.agreeing / self.nonzero if self.nonzero else float("nan")


@torch.no_grad()
def correct_gradient(gradient: Tensor, positive: Tensor, blend: float) -> Agreement:
    """Re-sign one gradient in place; `positive`: bool of its shape, True where sign(M) is +1."""
    present = gradient != 0
    agreement = Agreement(int(((gradient > 0) == positive)[present].sum()), int(present.sum()))
    directed = torch.where(positive, gradient.abs(), -gradient.abs())
    gradient.mul_(blend).add_(directed, alpha=1 - blend)
    return agreement


def correct_gradients(parameters: Mapping[str, nn.Parameter], signs: Mapping[str, Tensor], blend: float) -> float:
    """Re-sign gradients in place. `signs`: name -> bool tensor of the parameter's shape, True where sign(M) is +1.

    A parameter without a sign or without a gradient is left alone. Returns the share of non-zero gradient elements
    whose own sign agreed with M (nan when there are none), measured before the correction.
    """
    agreeing, nonzero = 0, 0
    for name, parameter in parameters.items():
        gradient, positive = parameter.grad, signs.get(name)
        if gradient is None or positive is None:
            continue
        part = correct_gradient(gradient, positive, blend)
        agreeing, nonzero = agreeing + part.agreeing, nonzero + part.nonzero
    return Agreement(agreeing, nonzero).share
