"""Sampling from logits with counter-based random numbers: a sample's tokens depend on its seed and its position only,
never on what else is in the batch or on how often the process was restarted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sprawl.rollout.batching.kernels import draw

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


BROKEN = -1
"""In place of a token: the logits are not finite, nothing can be sampled."""


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser: a bijection of 64-bit integers whose output looks random for counter inputs."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: int | Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per seed for its token number `positions` (one for all, or one each), 53 random bits each.
    Any Python integer is a seed."""
    keys = mix(np.array([(seed + _GOLDEN) & _MASK for seed in seeds], dtype=np.uint64))
    with np.errstate(over="ignore"):
        counters = (np.asarray(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        bits = mix(keys + counters)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seeds(seed: int, count: int) -> list[int]:
    """Seeds of `count` samples from one: the first is `seed` itself, the others do not overlap those of its
    neighbours (seed + 1 ...)."""
    rest = mix(np.array([(seed * _GOLDEN + i) & _MASK for i in range(1, count)], dtype=np.uint64))
    return [seed, *(int(value >> np.uint64(1)) for value in rest)]


def sample(
    logits: Tensor, temperature: float | Sequence[float], numbers: NDArray[np.float64]
) -> tuple[list[int], list[float]]:
    """Pick one token a row by inverting the CDF of softmax(logits / temperature); the largest logit at temperature 0.

    logits: fp32 [rows, vocab]; temperature: one for all rows or one each; numbers: [rows] in [0, 1). Returns token ids
    and their fp32 log-probs (nats) at the sampling temperature, at 1.0 for temperature 0; `BROKEN` and NaN for a row
    that is not finite. What a row gets depends on that row alone, bit for bit.
    """
    rows = len(logits)
    temperatures = np.ascontiguousarray(np.broadcast_to(np.asarray(temperature, dtype=np.float64), rows))
    tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
    draw(logits.contiguous().numpy(), temperatures, numbers, tokens, logprobs)
    return tokens.tolist(), logprobs.tolist()
