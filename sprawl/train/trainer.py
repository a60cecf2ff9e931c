"""One optimizer step of the fast circuit: batch in, weights changed, metrics out. No board, no files, no clock.

Masters are fp32 parameters of the decoder; the served view is derived from them elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sprawl.config import RunConfig
from sprawl.policy import Decoder
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.train import grpo
from sprawl.train.boundary import BoundaryCodec, WireCounter, make_codec
from sprawl.train.correction import correct_gradients
from sprawl.train.optimizer import RunOptimizer, build_optimizer
from sprawl.train.pipeline import Packed, StagedPolicy, pack_rows


@dataclass(frozen=True)
class StepStats:
    """What one step measured; units as in `board.records.StepRecord`."""

    loss: float
    grad_norm: float
    applied: bool
    entropy: float
    entropy_dense: float | None
    kl: float
    kl_dense: float | None
    mismatch: float
    mismatch_dense: float | None
    ratio_max_error: float
    clip_share: float
    zero_advantage_groups: int
    sign_agreement: float | None
    wire: WireCounter


def make_optimizer(decoder: Decoder, config: RunConfig) -> RunOptimizer:
    """The optimizer that the run's config describes."""
    return build_optimizer(decoder, config.optimizer)


class Trainer:
    """Policy, frozen reference and optimizer of one run."""

    def __init__(self, decoder: Decoder, reference: Decoder, config: RunConfig) -> None:
        self.config = config
        self.decoder = decoder
        self.optimizer = make_optimizer(decoder, config)
        self.codec: BoundaryCodec = make_codec(config.boundary, config.seed)
        layers = decoder.arch.split(config.policy.stages, config.policy.split)
        compute = getattr(torch, config.policy.compute_dtype)
        self.policy = StagedPolicy(decoder, layers, compute)
        self.reference = StagedPolicy(reference, layers, compute)

    def step(self, step: int, batch: RolloutBatch, signs: Mapping[str, Tensor] | None) -> StepStats:
        """Train on one batch. All passes of the iteration (old, update, reference) use the masks of `step`.

        A gradient that is not finite is refused: nothing is changed and `applied` is False.
        """
        config = self.config.grpo
        advantages = grpo.group_advantages(batch.rewards, batch.groups.long(), config.advantage)
        packs = self._pack_batch(batch)
        wire = WireCounter()
        totals = _Totals()
        probe_rows = packs[0][0][: self.config.probe.rows]
        probe = self._probe(step, batch, probe_rows)
        old = None if config.epochs == 1 else [self._frozen(self.policy, packed, step, wire) for _, packed in packs]
        for epoch in range(config.epochs):
            self.optimizer.zero_grad(set_to_none=True)
            for number, (rows, packed) in enumerate(packs):
                stats = self.policy.token_stats(
                    packed, codec=self.codec, step=step, temperature=self.temperature, wire=wire
                )
                # With a single pass over the data the old log-probs are these ones: the ratio is exactly 1.
                old_logprobs = stats.logprobs.detach() if old is None else old[number]
                token_advantages = advantages[rows].repeat_interleave(batch.sampled_lengths[rows])
                surrogate = grpo.clipped_loss(
                    stats.logprobs, old_logprobs, token_advantages, config.clip_low, config.clip_high
                )
                loss = surrogate.loss
                if config.kl_coef > 0:
                    reference = self._frozen(self.reference, packed, step, wire)
                    loss = loss + config.kl_coef * grpo.kl_k3(stats.logprobs, reference).sum()
                loss = loss / batch.response_tokens
                loss.backward()
                totals.loss += float(loss.detach())
                totals.clipped += surrogate.clipped
                if epoch == 0:
                    sampled = batch.flat_logprobs(rows)
                    totals.entropy += float(stats.entropy.sum())
                    totals.mismatch += float((stats.logprobs.detach() - sampled).abs().sum())
                    totals.ratio_error = max(totals.ratio_error, surrogate.ratio_error)
            norm, applied, agreement = self._apply(signs)
            if not applied:
                break
        tokens = batch.response_tokens
        return StepStats(
            loss=totals.loss / config.epochs,
            grad_norm=norm,
            applied=applied,
            entropy=totals.entropy / tokens,
            entropy_dense=probe.entropy_dense,
            kl=probe.kl,
            kl_dense=probe.kl_dense,
            mismatch=totals.mismatch / tokens,
            mismatch_dense=probe.mismatch_dense,
            ratio_max_error=totals.ratio_error,
            clip_share=totals.clipped / (tokens * config.epochs),
            zero_advantage_groups=grpo.zero_advantage_groups(batch.rewards, batch.groups),
            sign_agreement=agreement,
            wire=wire,
        )

    @property
    def temperature(self) -> float:
        return self.config.rollout.temperature

    def _pack_batch(self, batch: RolloutBatch) -> list[tuple[Tensor, Packed]]:
        rows = torch.arange(batch.samples).split(self.config.grpo.microbatch_rows)
        return [(part, pack_rows(batch, part)) for part in rows]

    @torch.no_grad()
    def _frozen(self, policy: StagedPolicy, packed: Packed, step: int, wire: WireCounter) -> Tensor:
        return policy.token_stats(packed, codec=self.codec, step=step, temperature=self.temperature, wire=wire).logprobs

    def _apply(self, signs: Mapping[str, Tensor] | None) -> tuple[float, bool, float | None]:
        """Clip, correct, step. Returns (norm before clipping, applied, sign agreement)."""
        parameters = dict(self.decoder.named_parameters())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), self.config.optimizer.clip_norm))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return norm, False, None
        agreement = None
        if signs is not None:
            agreement = correct_gradients(parameters, signs, self.config.anchor.blend)
        self.optimizer.step()
        return norm, True, agreement

    @torch.no_grad()
    def _probe(self, step: int, batch: RolloutBatch, rows: Tensor) -> _Probe:
        """KL to the reference through the codec on every step, and everything without it on probe steps.

        Reads the first rows of the batch only: the reference passes are for the reader, not for the gradient. Not
        counted on the wire for the same reason.
        """
        packed = pack_rows(batch, rows)

        def read(policy: StagedPolicy, codec: BoundaryCodec | None) -> Tensor:
            return policy.distributions(packed, codec=codec, step=step, temperature=self.temperature)

        kl = float(grpo.kl_exact(read(self.policy, self.codec), read(self.reference, self.codec)).mean())
        if step != 1 and step % self.config.probe.every:
            return _Probe(kl)
        dense = read(self.policy, None)
        taken = dense.gather(1, packed.targets[:, None]).squeeze(1)
        return _Probe(
            kl=kl,
            kl_dense=float(grpo.kl_exact(dense, read(self.reference, None)).mean()),
            entropy_dense=float(grpo.entropy(dense).mean()),
            mismatch_dense=float((taken - batch.flat_logprobs(rows)).abs().mean()),
        )


@dataclass
class _Totals:
    loss: float = 0.0
    clipped: int = 0
    entropy: float = 0.0
    mismatch: float = 0.0
    ratio_error: float = 0.0


@dataclass(frozen=True)
class _Probe:
    kl: float
    kl_dense: float | None = None
    entropy_dense: float | None = None
    mismatch_dense: float | None = None
