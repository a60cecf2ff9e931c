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


def matching_rows(batch: RolloutBatch, version: int) -> Tensor:
    """Rows [m] int64 of the groups of which `version` sampled every token of every row."""
    exact = (batch.version_start == version) & (batch.version_end == version)
    foreign = batch.groups[~exact].unique()
    return torch.nonzero(~torch.isin(batch.groups, foreign)).flatten()


def replay(
    decoder: Decoder,
    batch: RolloutBatch,
    config: RunConfig,
    observer: BasisObserver | None = None,
    rows: Tensor | None = None,
) -> Replay:
    """Gradient of the GRPO loss of `batch` at the decoder's present weights, dense, without a KL term.

    The old log-probs are the replayed weights' own, so the ratio is 1 and this is the plain policy gradient.
    `observer` sees the activations at the trainer's boundaries; it changes nothing. `rows` [m] int64: whole groups, as
    if the batch had no others; None: all.
    """
    rows = torch.arange(batch.samples) if rows is None else rows
    compute = getattr(torch, config.policy.compute_dtype)
    split = decoder.arch.split(config.policy.stages, config.policy.split) if observer else decoder.arch.split(1)
    policy = StagedPolicy(decoder, split, compute)
    targets = make_targets(batch, config)
    weights = targets.weights(rows, config)
    decoder.zero_grad(set_to_none=True)
    total = 0.0
    for micro in rows.split(config.grpo.microbatch_rows) if len(rows) else ():
        packed = pack_rows(batch, micro)
        logprobs = policy.token_stats(packed, codec=observer, step=0, temperature=config.rollout.temperature).logprobs
        loss = microbatch_loss(
            logprobs,
            logprobs.detach(),
            None,
            None,
            targets.advantages[micro],
            weights[micro],
            targets.counts[micro],
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


def zeros_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """M before the first fire, in fp32."""
    return {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in tensors.items()}


@torch.no_grad()
def fold(momentum: Mapping[str, Tensor] | None, gradients: Mapping[str, Tensor], keep: float) -> dict[str, Tensor]:
    """M <- keep * M + (1 - keep) * G_anc in fp32, as new tensors; `momentum` None is M = 0."""
    momentum = zeros_like(gradients) if momentum is None else momentum
    return {name: momentum[name] * keep + gradient.float() * (1 - keep) for name, gradient in gradients.items()}
