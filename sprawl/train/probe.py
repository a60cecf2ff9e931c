"""Compression-off probes: what the codec hides from the trainer, read without changing anything.

Two of them. The view probe reads KL, entropy and mismatch of some rows with every boundary dense. The gradient probe
compares the gradient through the codec with the dense one of the same samples; a codec is judged by that cosine and by
long-horizon stability, not by the error of its activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sprawl.board.records import GradientViews
from sprawl.train import grpo
from sprawl.train.codecs import DenseCodec
from sprawl.train.passes import Alone, Crossing, Fabric, Passes
from sprawl.train.pipeline import Packed


@dataclass(frozen=True)
class ViewProbe:
    """Token means over the probed rows, nats; the dense ones are None on steps without a compression-off probe."""

    kl: float
    kl_dense: float | None = None
    entropy_dense: float | None = None
    mismatch_dense: float | None = None


def probe_views(
    passes: Passes, packs: Sequence[Packed], sampler: Sequence[Tensor], crossing: Crossing, *, dense: bool
) -> ViewProbe:
    """KL to the reference through the codec and, when `dense`, everything without it. `sampler`: [m] log-probs a pack.

    Where the last stage is elsewhere every number is 0.
    """
    kl = _kl(passes, packs, crossing)[0]
    if not dense:
        return ViewProbe(kl)
    kl_dense, seen = _kl(passes, packs, replace(crossing, codec=DenseCodec()))
    count = max(1, sum(len(distribution) for distribution in seen.values()))
    entropy = sum(float(grpo.entropy(distribution).sum()) for distribution in seen.values())
    mismatch = sum(
        float((distribution.gather(1, packs[number].targets[:, None]).squeeze(1) - sampler[number]).abs().sum())
        for number, distribution in seen.items()
    )
    return ViewProbe(kl, kl_dense, entropy / count, mismatch / count)


def _kl(passes: Passes, packs: Sequence[Packed], crossing: Crossing) -> tuple[float, dict[int, Tensor]]:
    """Mean over tokens, and the policy's log-probs [m, V] a pack."""
    seen: dict[int, Tensor] = {}
    sums: dict[int, float] = {}
    passes.read("policy", packs, crossing, seen.__setitem__)

    def compare(number: int, reference: Tensor) -> None:
        sums[number] = float(grpo.kl_exact(seen[number], reference).sum())

    passes.read("reference", packs, crossing, compare)
    return sum(sums.values()) / max(1, sum(len(distribution) for distribution in seen.values())), seen


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
    fabric: Fabric

    def views(self, corrected: Mapping[str, Tensor], signs: Mapping[str, Tensor] | None) -> GradientViews:
        """The record, once the gradient is `corrected` and ready for the optimizer."""
        return GradientViews(
            cosine=self.cosine,
            norm_ratio=self.norm_ratio,
            sign_agreement=self.sign_agreement,
            corrected_cosine=_cosine(corrected, self.dense, self.fabric)[0],
            dense_sign_agreement=None if signs is None else _agreement_with_signs(self.dense, signs, self.fabric),
        )


def compare_gradients(
    compressed: Mapping[str, Tensor], dense: dict[str, Tensor], fabric: Fabric | None = None
) -> GradientProbe:
    """Cosine and norm ratio over all parameters of the model as one vector, sums in fp64."""
    fabric = fabric or Alone()
    cosine, ratio = _cosine(compressed, dense, fabric)
    agreeing, present = 0, 0
    for name, gradient in dense.items():
        if fabric.counts(name):
            product = gradient.sign() * compressed[name].sign()
            agreeing += int((product > 0).sum())
            present += int((product != 0).sum())
    return GradientProbe(dense, cosine, ratio, _share(agreeing, present, fabric), fabric)


def _share(part: int, whole: int, fabric: Fabric) -> float:
    """part / whole over all processes; nan where there is nothing."""
    parts, wholes = fabric.add(torch.tensor([part, whole], dtype=torch.float64)).tolist()
    return parts / wholes if wholes else float("nan")


def _cosine(first: Mapping[str, Tensor], second: Mapping[str, Tensor], fabric: Fabric) -> tuple[float, float]:
    """(cosine, |first| / |second|); nan where a norm is zero."""
    sums = torch.zeros(3, dtype=torch.float64)
    for name, gradient in second.items():
        if fabric.counts(name):
            # Sums of products in fp32 lose the small tensors of a large model: one fp64 copy of one tensor at a time.
            left, right = first[name].double().flatten(), gradient.double().flatten()
            sums += torch.stack((left @ right, left @ left, right @ right))
    product, one, other = fabric.add(sums).tolist()
    scale = (one * other) ** 0.5
    return product / scale if scale else float("nan"), (one / other) ** 0.5 if other else float("nan")


def _agreement_with_signs(gradients: Mapping[str, Tensor], signs: Mapping[str, Tensor], fabric: Fabric) -> float:
    """Share of non-zero elements whose sign is that of the sign map (True: +1); nan when there are none."""
    agreeing, present = 0, 0
    for name, positive in signs.items():
        if name in gradients and fabric.counts(name):
            nonzero = gradients[name] != 0
            agreeing += int(((gradients[name] > 0) == positive)[nonzero].sum())
            present += int(nonzero.sum())
    return _share(agreeing, present, fabric)
