"""Projecting stale weights forward (status report, appendix A). Pure functions on tensors and step numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sprawl.config import AnchorConfig


def fire_due(step: int, every: int) -> bool:
    """Whether a fire is due after optimizer step `step` (1, 2, ...)."""
    return step > 0 and step % every == 0


def checkpoints_for(step: int, config: AnchorConfig) -> list[int]:
    """Checkpoint steps that the fire due at `step` reads, newest first; none is newer than step - K.

    The secant needs a second one, c steps older; before there is one, the fire uses the stale weights as they are.
    Returns [] when even the first does not exist (step < K).
    """
    newest = step - config.lag
    if newest < 0:
        return []
    older = newest - config.every
    if config.replay == "newest" and config.forecast == "secant" and older >= 0:
        return [newest, older]
    return [newest]


def replayed_step(step: int, config: AnchorConfig, staleness: int) -> int:
    """The step whose rollouts are replayed: the newest batch, or the first one that the stale weights generated.

    Step s trains on what version s - 1 - staleness sampled, so version t - K sampled for step t - K + 1 + staleness.
    """
    if config.replay == "newest":
        return step
    return min(step, max(1, step - config.lag + 1 + staleness))


@torch.no_grad()
def secant(newest: Mapping[str, Tensor], older: Mapping[str, Tensor], horizon: float) -> dict[str, Tensor]:
    """theta(t-K) + horizon * (theta(t-K) - theta(t-K-c)), tensor by tensor in fp32; horizon = strength * K / c."""
    return {name: tensor + horizon * (tensor - older[name]) for name, tensor in newest.items()}
