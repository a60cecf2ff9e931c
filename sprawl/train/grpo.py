"""GRPO on tensors: advantages per group, the clipped objective, KL estimators. Pure functions, no model in sight.

Sources: DeepSeekMath (arXiv:2402.03300) for GRPO and the k3 estimator, DAPO (arXiv:2503.14476) for asymmetric
clipping and token-level aggregation over the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor, group: Tensor, kind: Literal["group_std", "group_mean"] = "group_std", eps: float = 1e-6
) -> Tensor:
    """Rewards [N] fp32 and group numbers [N] int64 -> advantages [N]: centred per group, divided by the group's
    standard deviation (unbiased) unless `group_mean`. A group whose rewards are all equal gets zeros."""
    _, index = torch.unique(group, return_inverse=True)
    count = torch.zeros(int(index.max()) + 1).index_add(0, index, torch.ones_like(rewards))
    mean = torch.zeros_like(count).index_add(0, index, rewards) / count
    centred = rewards - mean[index]
    if kind == "group_mean":
        return centred
    variance = torch.zeros_like(count).index_add(0, index, centred**2) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt()[index] + eps)


def zero_advantage_groups(rewards: Tensor, group: Tensor) -> int:
    """Groups whose samples all scored the same: they carry no gradient."""
    return sum(int((rewards[group == g] == rewards[group == g][0]).all()) for g in torch.unique(group))


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over tokens (divide by the token count of the whole batch for a token mean)."""

    loss: Tensor  # scalar, differentiable
    clipped: int  # tokens whose ratio was cut by the clip
    ratio_error: float  # max |ratio - 1|


def clipped_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """PPO's clipped surrogate, negated and summed over tokens; all inputs [m], nats.

    min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old).
    """
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        cut = (clipped * advantages < ratio * advantages).sum()
        error = (ratio - 1).abs().max() if ratio.numel() else ratio.new_zeros(())
    return PolicyLoss(-surrogate.sum(), int(cut), float(error))


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token k3 estimate of KL(policy || reference) from tokens the policy took: e^d - d - 1 with
    d = reference - logprobs. Non-negative, unbiased on-policy, differentiable. [m] -> [m], nats."""
    delta = reference - logprobs
    return delta.exp() - delta - 1


def entropy(logprobs: Tensor) -> Tensor:
    """Entropy of distributions given as log-probs, [m, V] -> [m], nats."""
    return -(logprobs.exp() * logprobs).sum(-1)


def kl_exact(logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) summed over the vocabulary, [m, V] each -> [m], nats.

    For reading, not for the loss: through a boundary codec log-probs differ by tens of nats, where an estimate from
    the token taken (k3) is dominated by single tokens or overflows.
    """
    return (logprobs.exp() * (logprobs - reference)).sum(-1)
