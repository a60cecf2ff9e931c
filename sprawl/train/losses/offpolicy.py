"""Correction for tokens that another policy sampled: a weight a token, pi_trainer / pi_sampler, bounded.

It multiplies the surrogate, whose own ratio is against the trainer's policy at the start of the step. No gradient flows
through it. Through a boundary codec the ratio is dominated by the codec (mismatch of several nats a token).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sprawl.config import OffPolicyConfig
from sprawl.train.losses.surrogate import sample_index, sample_sums


@dataclass(frozen=True)
class Correction:
    weight: Tensor  # [m] fp32, no gradient
    cut: Tensor  # [m] bool: truncated or masked


@torch.no_grad()
def correction(trainer: Tensor, sampler: Tensor, counts: Tensor, config: OffPolicyConfig) -> Correction:
    """Weights of the tokens [m] whose log-probs are `trainer` and `sampler`; `counts` [b] tokens a sample.

    tis: min(r, cap) a token (truncated importance sampling, Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl). icepop: r inside [low, high], else 0 (Ring-1T, arXiv:2510.18855).
    sequence_mask: the product of r over the sequence, or 0 for all its tokens when that is above the cap.
    """
    log_ratio = trainer - sampler
    if config.kind == "tis":
        ratio = log_ratio.exp()
        return Correction(ratio.clamp(max=config.tis_cap), ratio > config.tis_cap)
    if config.kind == "icepop":
        ratio = log_ratio.exp()
        cut = (ratio < config.icepop_low) | (ratio > config.icepop_high)
        return Correction(ratio.masked_fill(cut, 0.0), cut)
    if config.kind == "sequence_mask":
        ratio = sample_sums(log_ratio, counts).exp()[sample_index(counts)]
        cut = ratio > config.sequence_cap
        return Correction(ratio.masked_fill(cut, 0.0), cut)
    return Correction(torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool))
