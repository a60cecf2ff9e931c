"""The dense replay: one uncompressed forward and backward at given weights, no optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sprawl.config import RunConfig
from sprawl.policy import Decoder
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.train import grpo
from sprawl.train.pipeline import StagedPolicy, pack_rows


@dataclass(frozen=True)
class Replay:
    gradients: dict[str, Tensor]  # fp32, every parameter of the model
    loss: float
    grad_norm: float


def replay(decoder: Decoder, batch: RolloutBatch, config: RunConfig) -> Replay:
    """Gradient of the GRPO loss of `batch` at the decoder's present weights, dense.

    The old log-probs are the replayed weights' own, so the ratio is 1 and this is the plain policy gradient.
    """
    compute = getattr(torch, config.policy.compute_dtype)
    policy = StagedPolicy(decoder, decoder.arch.split(1), compute)
    advantages = grpo.group_advantages(batch.rewards, batch.groups.long(), config.grpo.advantage)
    decoder.zero_grad(set_to_none=True)
    total = 0.0
    for rows in torch.arange(batch.samples).split(config.grpo.microbatch_rows):
        packed = pack_rows(batch, rows)
        stats = policy.token_stats(packed, codec=None, step=0, temperature=config.rollout.temperature)
        token_advantages = advantages[rows].repeat_interleave(batch.sampled_lengths[rows])
        loss = grpo.clipped_loss(
            stats.logprobs, stats.logprobs.detach(), token_advantages, config.grpo.clip_low, config.grpo.clip_high
        ).loss
        loss = loss / batch.response_tokens
        loss.backward()
        total += float(loss.detach())
    gradients = {
        name: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for name, parameter in decoder.named_parameters()
    }
    norm = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients.values()])))
    decoder.zero_grad(set_to_none=True)
    return Replay({name: g.detach() for name, g in gradients.items()}, total, norm)


@torch.no_grad()
def fold(momentum: Mapping[str, Tensor] | None, gradients: Mapping[str, Tensor], keep: float) -> dict[str, Tensor]:
    """M <- keep * M + (1 - keep) * G_anc in fp32; the first fire starts from M = 0, which has the sign of G_anc."""
    if momentum is None:
        return {name: gradient.float() * (1 - keep) for name, gradient in gradients.items()}
    return {name: momentum[name] * keep + gradient.float() * (1 - keep) for name, gradient in gradients.items()}
