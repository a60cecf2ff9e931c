"""From rewards to advantages, group by group (GRPO: DeepSeekMath, arXiv:2402.03300)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor, group: Tensor, kind: Literal["group_std", "group_mean"] = "group_std", eps: float = 1e-6
) -> Tensor:
    """Rewards [N] fp32 and group numbers [N] int64 -> advantages [N]: centred per group, divided by the group's
    standard deviation (unbiased) unless `group_mean` (Dr. GRPO, arXiv:2503.20783). A group whose rewards are all equal
    gets zeros."""
    _, index = torch.unique(group, return_inverse=True)
    count = torch.zeros(int(index.max()) + 1).index_add(0, index, torch.ones_like(rewards))
    mean = torch.zeros_like(count).index_add(0, index, rewards) / count
    centred = rewards - mean[index]
    # The mean of equal numbers can be off by a rounding error, and the standard deviation would blow it up to 1.
    centred = torch.where(uniform_groups(rewards, group), 0.0, centred)
    if kind == "group_mean":
        return centred
    variance = torch.zeros_like(count).index_add(0, index, centred**2) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt()[index] + eps)


def uniform_groups(rewards: Tensor, group: Tensor) -> Tensor:
    """[N] bool: whether all samples of the row's group scored the same, so that the row carries no gradient."""
    _, index = torch.unique(group, return_inverse=True)
    groups = int(index.max()) + 1
    low = torch.full((groups,), torch.inf).scatter_reduce(0, index, rewards, "amin")
    high = torch.full((groups,), -torch.inf).scatter_reduce(0, index, rewards, "amax")
    return (low == high)[index]


def zero_advantage_groups(rewards: Tensor, group: Tensor) -> int:
    """Groups whose samples all scored the same."""
    return int(torch.unique(group[uniform_groups(rewards, group.long())]).numel())
