"""GRPO on tensors by its short name: the pure functions of `sprawl.train.losses`, no model in sight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sprawl.train.losses import surrogate
from sprawl.train.losses.advantages import group_advantages, uniform_groups, zero_advantage_groups
from sprawl.train.losses.kl import entropy, kl_exact, kl_k1, kl_k2, kl_k3

__all__ = [
    "PolicyLoss",
    "clipped_loss",
    "entropy",
    "group_advantages",
    "kl_exact",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "uniform_groups",
    "zero_advantage_groups",
]


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over tokens (divide by the token count of the whole batch for a token mean)."""

    loss: Tensor  # scalar, differentiable
    clipped: int  # tokens whose ratio was cut by the clip
    ratio_error: float  # max |ratio - 1|


def clipped_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """PPO's clipped surrogate, negated and summed over tokens; all inputs [m], nats."""
    part = surrogate.ppo(logprobs, old, advantages, clip_low, clip_high)
    return PolicyLoss(part.per_token.sum(), int(part.cut.sum()), part.ratio_error)
