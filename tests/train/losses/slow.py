"""The losses once more, slow and obvious: plain Python floats, one token at a time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from sprawl.config import OffPolicyConfig

Rows = list[list[float]]
"""A list of numbers a sample."""


def advantages(groups: Rows, kind: str) -> list[float]:
    result = []
    for rewards in groups:
        mean = sum(rewards) / len(rewards)
        spread = 1.0 if kind == "group_mean" else statistics.stdev(rewards) + 1e-6
        result += [0.0 if min(rewards) == max(rewards) else (reward - mean) / spread for reward in rewards]
    return result


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def token_losses(kind: str, logprobs: Rows, old: Rows, advantage: Sequence[float], low: float, high: float) -> Rows:
    result: Rows = []
    for new_row, old_row, a in zip(logprobs, old, advantage, strict=True):
        ratios = [math.exp(new - before) for new, before in zip(new_row, old_row, strict=True)]
        if kind == "gspo" and ratios:
            whole = math.exp(sum(new - before for new, before in zip(new_row, old_row, strict=True)) / len(new_row))
            ratios = [whole] * len(ratios)
        row = []
        for ratio, new in zip(ratios, new_row, strict=True):
            if kind == "cispo":
                row.append(-clip(ratio, 1 - low, 1 + high) * a * new)
            else:
                row.append(-min(ratio * a, clip(ratio, 1 - low, 1 + high) * a))
        result.append(row)
    return result


def kl(kind: str, new: float, reference: float) -> float:
    if kind == "k1":
        return new - reference
    if kind == "k2":
        return 0.5 * (new - reference) ** 2
    return math.exp(reference - new) - (reference - new) - 1


def off_policy_weights(trainer: Rows, sampler: Rows, config: OffPolicyConfig) -> Rows:
    result: Rows = []
    for ours, theirs in zip(trainer, sampler, strict=True):
        ratios = [math.exp(a - b) for a, b in zip(ours, theirs, strict=True)]
        if config.kind == "tis":
            result.append([min(ratio, config.tis_cap) for ratio in ratios])
        elif config.kind == "icepop":
            result.append([r if config.icepop_low <= r <= config.icepop_high else 0.0 for r in ratios])
        elif config.kind == "sequence_mask":
            whole = math.exp(sum(ours) - sum(theirs))
            result.append([whole if whole <= config.sequence_cap else 0.0] * len(ratios))
        else:
            result.append([1.0] * len(ratios))
    return result


def aggregate(losses: Rows, include: Sequence[bool], kind: str, max_tokens: int) -> float:
    rows = [row for row, counted in zip(losses, include, strict=True) if counted]
    if not rows:
        return 0.0
    if kind == "token_mean":
        tokens = [value for row in rows for value in row]
        return sum(tokens) / max(1, len(tokens))
    if kind == "sequence_mean":
        return sum(sum(row) / len(row) if row else 0.0 for row in rows) / len(rows)
    return sum(sum(row) for row in rows) / (len(rows) * max_tokens)
