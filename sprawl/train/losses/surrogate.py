"""Policy-gradient losses a token, before any averaging. Log-probs in nats; `counts` [b] int64 says how many of the
flat tokens [m] each sample has, in sample order, and must add up to m."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    """per_token: [m], differentiable. cut: [m] bool, where the clip took the gradient away (CISPO: bounded it)."""

    per_token: Tensor
    cut: Tensor
    ratio_error: float  # max |ratio - 1| over tokens


def sample_index(counts: Tensor) -> Tensor:
    """[m] int64: the sample of every token."""
    return torch.repeat_interleave(torch.arange(counts.shape[0], device=counts.device), counts)


def sample_sums(values: Tensor, counts: Tensor) -> Tensor:
    """[m] -> [b]: sums over the tokens of each sample; 0 for a sample without tokens."""
    empty = torch.zeros(counts.shape[0], dtype=values.dtype, device=values.device)
    return empty.index_add(0, sample_index(counts), values)


def _ratio_error(ratio: Tensor) -> float:
    return float((ratio.detach() - 1).abs().max()) if ratio.numel() else 0.0


def _pessimistic(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A), token by token."""
    clipped = ratio.clamp(1 - low, 1 + high)
    cut = (clipped * advantages < ratio * advantages).detach()
    return Surrogate(-torch.minimum(ratio * advantages, clipped * advantages), cut, _ratio_error(ratio))


def ppo(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    """PPO's clipped surrogate with r = exp(logprobs - old); `low` and `high` may differ (DAPO's clip-higher,
    arXiv:2503.14476). All inputs [m]."""
    return _pessimistic((logprobs - old).exp(), advantages, low, high)


def gspo(logprobs: Tensor, old: Tensor, advantages: Tensor, counts: Tensor, low: float, high: float) -> Surrogate:
    """GSPO (arXiv:2507.18071): the ratio is the sequence's, length-normalised: exp(mean over its tokens of the
    log-ratio), clipped as a whole. A token gets its sequence's loss, so that a token weight of 1/|y| sums to it."""
    log_ratio = logprobs - old
    ratio = (sample_sums(log_ratio, counts) / counts.clamp(min=1)).exp()
    return _pessimistic(ratio[sample_index(counts)], advantages, low, high)


def cispo(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    """CISPO (MiniMax-M1, arXiv:2506.13585): -stop_gradient(clip(r, 1 - low, 1 + high)) A log pi. No token loses its
    gradient. The paper leaves the lower bound open: `low` = 1."""
    ratio = (logprobs.detach() - old).exp()
    bounded = ratio.clamp(1 - low, 1 + high)
    return Surrogate(-bounded * advantages * logprobs, bounded != ratio, _ratio_error(ratio))
