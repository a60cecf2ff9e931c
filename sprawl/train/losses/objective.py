"""The run's loss: what the config asks for, put together from the pure parts. The trainer and the anchor share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sprawl.config import GrpoConfig, RunConfig
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.train.losses import surrogate
from sprawl.train.losses.advantages import group_advantages, uniform_groups
from sprawl.train.losses.aggregate import sample_weights
from sprawl.train.losses.kl import kl_estimate
from sprawl.train.losses.offpolicy import correction
from sprawl.train.losses.selection import overlong_penalty


@dataclass(frozen=True)
class Targets:
    """What a batch is trained towards, a row a sample.

    advantages: [N] fp32. include: [N] bool, whether the sample counts in the loss. counts: [N] int64 loss tokens.
    """

    advantages: Tensor
    include: Tensor
    counts: Tensor

    def weights(self, rows: Tensor, config: RunConfig) -> Tensor:
        """[N] fp32, the weight of a token of each sample in an update on `rows`; 0 for all others."""
        weights = torch.zeros(self.include.shape[0])
        weights[rows] = sample_weights(
            self.counts[rows], self.include[rows], config.grpo.aggregation, config.rollout.max_new_tokens
        )
        return weights


def make_targets(batch: RolloutBatch, config: RunConfig) -> Targets:
    """Rewards, shaped for length where asked, to advantages; and which samples count."""
    grpo, limit = config.grpo, config.rollout.max_new_tokens
    rewards, groups = batch.rewards, batch.groups.long()
    include = torch.ones(batch.samples, dtype=torch.bool)
    if grpo.overlong.kind == "penalty" and grpo.overlong.buffer is not None:
        rewards = rewards + overlong_penalty(batch.response_lengths, limit, grpo.overlong.buffer)
    if grpo.overlong.kind == "filter":
        include &= ~truncated(batch, limit)
    if grpo.zero_groups == "drop":
        include &= ~uniform_groups(rewards, groups)
    return Targets(group_advantages(rewards, groups, grpo.advantage), include, batch.sampled_lengths.long())


def truncated(batch: RolloutBatch, limit: int) -> Tensor:
    """[N] bool: the response ended at the limit and not by itself. Batches of earlier releases do not say it; there a
    response of `limit` tokens counts as truncated."""
    return batch.truncated if batch.truncated is not None else batch.response_lengths >= limit


@dataclass(frozen=True)
class MicrobatchLoss:
    """loss: scalar, differentiable, this microbatch's part of the update's loss. clipped, corrected: tokens that the
    clip and the off-policy bound cut. ratio_error: max |ratio - 1|."""

    loss: Tensor
    clipped: int
    corrected: int
    ratio_error: float


def microbatch_loss(
    logprobs: Tensor,
    old: Tensor,
    sampler: Tensor | None,
    reference: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    counts: Tensor,
    config: GrpoConfig,
) -> MicrobatchLoss:
    """The weighted sum of token losses of some samples.

    logprobs (differentiable), old (start of the step), sampler and reference: [m] nats; sampler None: no off-policy
    correction; reference None: no KL. advantages, weights, counts: [b], a sample each.
    """
    index = surrogate.sample_index(counts)
    token_advantages, low, high = advantages[index], config.clip_low, config.clip_high
    if config.loss == "gspo":
        part = surrogate.gspo(logprobs, old, token_advantages, counts, low, high)
    elif config.loss == "cispo":
        part = surrogate.cispo(logprobs, old, token_advantages, low, high)
    else:
        part = surrogate.ppo(logprobs, old, token_advantages, low, high)
    per_token, corrected = part.per_token, 0
    if sampler is not None and config.off_policy.kind != "none":
        bound = correction(old, sampler, counts, config.off_policy)
        per_token = per_token * bound.weight
        corrected = int(bound.cut.sum())
    if reference is not None and config.kl_coef > 0:
        per_token = per_token + config.kl_coef * kl_estimate(logprobs, reference, config.kl)
    return MicrobatchLoss((per_token * weights[index]).sum(), int(part.cut.sum()), corrected, part.ratio_error)
