"""Sampling from logits with counter-based random numbers: a sample's tokens depend on its seed and its position only,
never on what else is in the batch or on how often the process was restarted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class NonFiniteLogits(Exception):
    """The model produced NaN or infinite logits: its weights are broken, nothing can be sampled."""


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser: a bijection of 64-bit integers whose output looks random for counter inputs."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def uniforms(seeds: Sequence[int], position: int) -> NDArray[np.float64]:
    """One number in [0, 1) per seed for token number `position`, 53 random bits each. Any Python integer is a seed."""
    keys = mix(np.array([(seed + _GOLDEN) & _MASK for seed in seeds], dtype=np.uint64))
    counter = np.uint64(((position + 1) * _GOLDEN) & _MASK)
    with np.errstate(over="ignore"):
        bits = mix(keys + counter)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seeds(seed: int, count: int) -> list[int]:
    """Seeds of `count` samples from one: the first is `seed` itself, the others do not overlap those of its
    neighbours (seed + 1 ...)."""
    rest = mix(np.array([(seed * _GOLDEN + i) & _MASK for i in range(1, count)], dtype=np.uint64))
    return [seed, *(int(value >> np.uint64(1)) for value in rest)]


def sample(logits: Tensor, temperature: float, numbers: NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """Pick one token a row by inverting the CDF of softmax(logits / temperature); the largest logit at temperature 0.

    logits: fp32 [rows, vocab]; numbers: [rows] in [0, 1). Returns token ids and their fp32 log-probs (nats) at the
    sampling temperature, at 1.0 for temperature 0. Raises NonFiniteLogits.
    """
    scale = temperature if temperature > 0 else 1.0
    logprobs = torch.log_softmax(logits.double() / scale, dim=-1)
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteLogits
    if temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        cdf = logprobs.exp().cumsum(dim=-1)
        total = cdf[:, -1]
        # Below the total, so that rounding can never select past the last token that has any probability.
        targets = torch.minimum(torch.from_numpy(numbers) * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cdf, targets.unsqueeze(-1), right=True).squeeze(-1)
    picked = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
    return tokens.tolist(), picked.tolist()
