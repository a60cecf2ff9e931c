"""Compression-off probes: what the codec hides from the trainer, read without changing anything.

Two of them. The view probe reads KL, entropy and mismatch of some rows with every boundary dense. The gradient probe
compares the gradient through the codec with the dense one of the same samples; a codec is judged by that cosine and by
long-horizon stability, not by the error of its activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sprawl.board.records import GradientViews
from sprawl.train import grpo
from sprawl.train.codecs import BoundaryCodec, DenseCodec, WireCounter
from sprawl.train.pipeline import Packed, StagedPolicy


@dataclass(frozen=True)
class ViewProbe:
    """Token means over the probed rows, nats; the dense ones are None on steps without a compression-off probe."""

    kl: float
    kl_dense: float | None = None
    entropy_dense: float | None = None
    mismatch_dense: float | None = None


@torch.no_grad()
def probe_views(
    policy: StagedPolicy,
    reference: StagedPolicy,
    packed: Packed,
    sampler: Tensor,
    codec: BoundaryCodec,
    step: int,
    temperature: float,
    *,
    dense: bool,
    wire: WireCounter,
) -> ViewProbe:
    """KL to the reference through the codec and, when `dense`, everything without it. `sampler`: [m] log-probs."""

    def read(model: StagedPolicy, through: BoundaryCodec) -> Tensor:
        return model.distributions(packed, codec=through, step=step, temperature=temperature, wire=wire)

    kl = float(grpo.kl_exact(read(policy, codec), read(reference, codec)).mean())
    if not dense:
        return ViewProbe(kl)
    seen = read(policy, DenseCodec())
    taken = seen.gather(1, packed.targets[:, None]).squeeze(1)
    return ViewProbe(
        kl=kl,
        kl_dense=float(grpo.kl_exact(seen, read(reference, DenseCodec())).mean()),
        entropy_dense=float(grpo.entropy(seen).mean()),
        mismatch_dense=float((taken - sampler).abs().mean()),
    )


def take_gradients(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """Move the gradients out of the parameters; one that has none gives zeros."""
    taken = {}
    for name, parameter in parameters.items():
        taken[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
    return taken


@dataclass(frozen=True)
class GradientProbe:
    """The dense gradient of the samples of an update, and how the compressed one compares with it."""

    dense: dict[str, Tensor]
    cosine: float
    norm_ratio: float
    sign_agreement: float

    def views(self, corrected: Mapping[str, Tensor], signs: Mapping[str, Tensor] | None) -> GradientViews:
        """The record, once the gradient is `corrected` and ready for the optimizer."""
        return GradientViews(
            cosine=self.cosine,
            norm_ratio=self.norm_ratio,
            sign_agreement=self.sign_agreement,
            corrected_cosine=_cosine(corrected, self.dense)[0],
            dense_sign_agreement=None if signs is None else _agreement_with_signs(self.dense, signs),
        )


def compare_gradients(compressed: Mapping[str, Tensor], dense: dict[str, Tensor]) -> GradientProbe:
    """Cosine and norm ratio over all parameters as one vector, sums in fp64."""
    cosine, ratio = _cosine(compressed, dense)
    agreeing, present = 0, 0
    for name, gradient in dense.items():
        product = gradient.sign() * compressed[name].sign()
        agreeing += int((product > 0).sum())
        present += int((product != 0).sum())
    return GradientProbe(dense, cosine, ratio, agreeing / present if present else float("nan"))


def _cosine(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> tuple[float, float]:
    """(cosine, |first| / |second|); nan where a norm is zero."""
    product, one, other = 0.0, 0.0, 0.0
    for name, gradient in second.items():
        # Sums of products in fp32 lose the small tensors of a large model: one fp64 copy of one tensor at a time.
        left, right = first[name].double().flatten(), gradient.double().flatten()
        product += float(left @ right)
        one += float(left @ left)
        other += float(right @ right)
    scale = (one * other) ** 0.5
    return product / scale if scale else float("nan"), (one / other) ** 0.5 if other else float("nan")


def _agreement_with_signs(gradients: Mapping[str, Tensor], signs: Mapping[str, Tensor]) -> float:
    """Share of non-zero elements whose sign is that of the sign map (True: +1); nan when there are none."""
    agreeing, present = 0, 0
    for name, positive in signs.items():
        nonzero = gradients[name] != 0
        agreeing += int(((gradients[name] > 0) == positive)[nonzero].sum())
        present += int(nonzero.sum())
    return agreeing / present if present else float("nan")
