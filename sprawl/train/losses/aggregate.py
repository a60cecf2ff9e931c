"""How token losses become one number: a weight a sample, fixed for a whole update before its microbatches run."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "dr_grpo"]


def sample_weights(counts: Tensor, include: Tensor, kind: Aggregation, max_tokens: int) -> Tensor:
    """Weight of each token of each sample, [N] fp32; the loss is the weighted sum over all tokens of the update.

    counts: [N] int64 tokens that carry loss. include: [N] bool, samples that count at all, in numerator and
    denominator. max_tokens: the response limit, read by dr_grpo.

    token_mean: 1 / all tokens (DAPO, arXiv:2503.14476). sequence_mean: mean over samples of their token means (GRPO).
    dr_grpo: 1 / (samples * max_tokens), no length in it (arXiv:2503.20783).
    """
    samples = include.sum().clamp(min=1).float()
    ones = include.float()
    if kind == "token_mean":
        return ones / (counts * include).sum().clamp(min=1).float()
    if kind == "sequence_mean":
        return ones / (counts.clamp(min=1).float() * samples)
    return ones / (samples * max_tokens)
