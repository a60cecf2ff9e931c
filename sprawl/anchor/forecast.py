"""Projecting stale weights forward (status report, appendix A). Pure functions on tensors and step numbers.

A fire due at step t may read checkpoints c steps apart, the newest of them n = t - K. Its forecast is

    theta^ = theta(n) + sum over the older ones i of  f_i * (theta(n) - theta(i))

tensor by tensor in fp32, with strength s and x the steps of the checkpoints:

- `stale` reads one checkpoint; no factors, theta(n) as it is.
- `secant` reads two; f = s K / c, for s = 1 the report's formula.
- `window` (progressive window) reads two, the newest and the oldest of the newest `window` checkpoints:
  f = s K / (n - x_oldest), a secant over a baseline that grows with the checkpoints, up to (window - 1) c steps.
- `fit4` reads m = 4 and takes the least-squares line through them at step t: f_i = -s w_i, where
  w_i = 1/m + (t - x_mean) (x_i - x_mean) / sum_j (x_j - x_mean)^2.

Strength scales how far the forecast leaves the newest checkpoint, whatever the forecast is; 0 is `stale`. A trajectory
that is linear in the step is continued exactly by all but `stale` at strength 1. Before its checkpoints exist a
forecast uses those that do: with two of them all three are the secant, with one the weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sprawl.config import AnchorConfig


def fire_due(step: int, every: int) -> bool:
    """Whether a fire is due after optimizer step `step` (1, 2, ...)."""
    return step > 0 and step % every == 0


def last_fire(step: int, every: int) -> int:
    """The newest fire that is due once optimizer step `step` is done; 0: none yet."""
    return step - step % every


def newest_allowed(step: int, lag: int) -> int:
    """Step of the newest weights that a fire due at `step` may see: t - K, or the base model, which everybody has from
    the start."""
    return max(0, step - lag)


def checkpoints_for(step: int, config: AnchorConfig) -> list[int]:
    """Checkpoint steps that the fire due at `step` reads, newest first and never empty; none is newer than t - K."""
    newest = newest_allowed(step, config.lag)
    if config.replay == "matching" or config.forecast == "stale":
        return [newest]
    count = {"secant": 2, "window": config.window, "fit4": 4}[config.forecast]
    there = [at for at in range(newest, newest - count * config.every, -config.every) if at >= 0]
    return [there[0], there[-1]] if config.forecast == "window" and len(there) > 1 else there


def checkpoints_needed(next_fire: int, last: int, config: AnchorConfig) -> set[int]:
    """Steps of all checkpoints that the fires due at `next_fire`, one c later, ... up to `last` read."""
    fires = range(next_fire, last + 1, config.every)
    return {at for fire in fires for at in checkpoints_for(fire, config)}


def factors(step: int, used: Sequence[int], config: AnchorConfig) -> list[float]:
    """f_i of every checkpoint in `used` but the first (see above), for the fire due at `step`.

    `used`: steps as `checkpoints_for` gives them.
    """
    newest, older = used[0], used[1:]
    if len(used) < 2:
        return []
    horizon = step - newest
    if len(used) == 2:
        return [config.strength * horizon / (newest - older[0])]
    mean = sum(used) / len(used)
    spread = sum((at - mean) ** 2 for at in used)
    return [-config.strength * (1 / len(used) + (step - mean) * (at - mean) / spread) for at in older]


@torch.no_grad()
def project(newest: Mapping[str, Tensor], older: Iterable[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """newest + sum of factor * (newest - older) in fp32, as new tensors. `older` is consumed one state at a time."""
    result = {name: tensor.clone() for name, tensor in newest.items()}
    for factor, state in older:
        for name, tensor in newest.items():
            result[name] += (tensor - state[name]).mul_(factor)
    return result


def secant(newest: Mapping[str, Tensor], older: Mapping[str, Tensor], horizon: float) -> dict[str, Tensor]:
    """theta(t-K) + horizon * (theta(t-K) - theta(t-K-c)), tensor by tensor in fp32; horizon = strength * K / c."""
    return project(newest, [(horizon, older)])


def replayed_step(step: int, config: AnchorConfig, staleness: int) -> int:
    """The step whose rollouts are replayed: the newest batch, or the first one that the stale weights generated.

    Step s trains on what version s - 1 - staleness sampled, so version t - K sampled for step t - K + 1 + staleness.
    """
    if config.replay == "newest":
        return step
    return min(step, newest_allowed(step, config.lag) + 1 + staleness)
