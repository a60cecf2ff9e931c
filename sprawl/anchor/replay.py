"""The dense replay: one uncompressed forward and backward at given weights, no optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sprawl.config import RunConfig
from sprawl.policy import Decoder
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.train.codecs import BasisObserver
from sprawl.train.losses.objective import make_targets, microbatch_loss
from sprawl.train.pipeline import StagedPolicy, pack_rows


@dataclass(frozen=True)
class Replay:
    gradients: dict[str, Tensor]  # fp32, every parameter of the model
    loss: float
    grad_norm: float


def replay(decoder: Decoder, batch: RolloutBatch, config: RunConfig, observer: BasisObserver | None = None) -> Replay:
    """Gradient of the GRPO loss of `batch` at the decoder's present weights, dense, without a KL term.

    The old log-probs are the replayed weights' own, so the ratio is 1 and this is the plain policy gradient.
    `observer` sees the activations at the trainer's boundaries; it changes nothing.
    """
    compute = getattr(torch, config.policy.compute_dtype)
    split = decoder.arch.split(config.policy.stages, config.policy.split) if observer else decoder.arch.split(1)
    policy = StagedPolicy(decoder, split, compute)
    targets = make_targets(batch, config)
    weights = targets.weights(torch.arange(batch.samples), config)
    decoder.zero_grad(set_to_none=True)
    total = 0.0
    for rows in torch.arange(batch.samples).split(config.grpo.microbatch_rows):
        packed = pack_rows(batch, rows)
        logprobs = policy.token_stats(packed, codec=observer, step=0, temperature=config.rollout.temperature).logprobs
        loss = microbatch_loss(
            logprobs,
            logprobs.detach(),
            None,
            None,
            targets.advantages[rows],
            weights[rows],
            targets.counts[rows],
            config.grpo,
        ).loss
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
