"""One optimizer step of the fast circuit: batch in, weights changed, metrics out. No board, no files, no clock.

Masters are fp32 parameters of the decoder; the served view is derived from them elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sprawl.board.records import GradientViews
from sprawl.config import RunConfig
from sprawl.policy import Decoder
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.train import grpo
from sprawl.train.boundary import BoundaryCodec, DenseCodec, SubspaceCodec, WireCounter, make_codec
from sprawl.train.correction import correct_gradients
from sprawl.train.losses.objective import Targets, make_targets, microbatch_loss
from sprawl.train.optimizer import RunOptimizer, build_optimizer
from sprawl.train.pipeline import Packed, StagedPolicy, pack_rows
from sprawl.train.probe import GradientProbe, ViewProbe, compare_gradients, probe_views, take_gradients


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
    gradient: GradientViews | None = None
    dense_step: bool = False
    updates: int = 1
    off_policy_cut: float | None = None
    probe_bytes: int = 0


def make_optimizer(decoder: Decoder, config: RunConfig) -> RunOptimizer:
    """The optimizer that the run's config describes."""
    return build_optimizer(decoder, config.optimizer)


@dataclass(frozen=True)
class Microbatch:
    """Rows of a batch ([b] int64), packed, and the trainer's log-probs [m] before the step where they are needed."""

    rows: Tensor
    packed: Packed
    old: Tensor | None = None


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

    def use_bases(self, bases: Mapping[int, Tensor] | None) -> None:
        """Boundary bases of the newest fire; only the subspace codec has any."""
        if isinstance(self.codec, SubspaceCodec):
            self.codec.use(bases)

    def dense_step(self, step: int) -> bool:
        """Whether every pass of the step runs through dense boundaries."""
        every = self.config.boundary.dense_every
        return self.config.boundary.codec == "dense" or (every > 0 and step % every == 0)

    def step(self, step: int, batch: RolloutBatch, signs: Mapping[str, Tensor] | None) -> StepStats:
        """Train on one batch: `epochs` x `minibatches` optimizer updates. All passes of the iteration (old, update,
        reference) use the masks of `step`.

        A gradient that is not finite is refused and ends the step: `applied` is False, and of several updates those
        before it stand (`updates` counts them). With one update nothing is changed.
        """
        config = self.config.grpo
        self.codec.begin(step)
        codec = DenseCodec() if self.dense_step(step) else self.codec
        targets = make_targets(batch, self.config)
        updates = self.plan(batch)
        wire, probe_wire = WireCounter(), WireCounter()
        views = self._probe_views(step, batch, updates[0][0].rows, codec, probe_wire)
        dense = self._dense_gradient(step, batch, updates[0], targets, probe_wire)
        if config.epochs * len(updates) > 1:
            updates = [[self._with_old(micro, codec, step, wire) for micro in update] for update in updates]
        totals, applied = _Totals(), _Applied()
        for number, update in enumerate(updates * config.epochs):
            last_epoch = number >= len(updates) * (config.epochs - 1)
            part = self._backward(step, batch, update, targets, codec, wire, forget=last_epoch)
            totals.add(part, first=number == 0, first_epoch=number < len(updates))
            probe = compare_gradients(self._gradients(), dense) if dense is not None and number == 0 else None
            applied.add(self._apply(signs, probe))
            if not applied.ok:
                break
        tokens = batch.response_tokens
        return StepStats(
            loss=totals.loss / (number + 1),
            grad_norm=applied.norm,
            applied=applied.ok,
            entropy=totals.entropy / tokens,
            entropy_dense=views.entropy_dense,
            kl=views.kl,
            kl_dense=views.kl_dense,
            mismatch=totals.mismatch / tokens,
            mismatch_dense=views.mismatch_dense,
            ratio_max_error=totals.ratio_error,
            clip_share=totals.clipped / (tokens * config.epochs),
            zero_advantage_groups=grpo.zero_advantage_groups(batch.rewards, batch.groups),
            sign_agreement=applied.agreement,
            wire=wire,
            gradient=applied.views,
            dense_step=self.dense_step(step),
            updates=applied.count,
            off_policy_cut=None if config.off_policy.kind == "none" else totals.corrected / (tokens * config.epochs),
            probe_bytes=probe_wire.sent,
        )

    @property
    def temperature(self) -> float:
        return self.config.rollout.temperature

    def plan(self, batch: RolloutBatch) -> list[list[Microbatch]]:
        """The updates of an epoch: whole groups each, their numbers at most one apart, cut into microbatches."""
        _, sizes = torch.unique_consecutive(batch.groups, return_counts=True)
        shares = sizes.tensor_split(min(len(sizes), self.config.grpo.minibatches))
        parts = torch.arange(batch.samples).split([int(share.sum()) for share in shares])
        return [
            [Microbatch(rows, pack_rows(batch, rows)) for rows in part.split(self.config.grpo.microbatch_rows)]
            for part in parts
        ]

    def _with_old(self, micro: Microbatch, codec: BoundaryCodec, step: int, wire: WireCounter) -> Microbatch:
        return replace(micro, old=self._frozen(self.policy, micro.packed, codec, step, wire))

    @torch.no_grad()
    def _frozen(
        self, policy: StagedPolicy, packed: Packed, codec: BoundaryCodec, step: int, wire: WireCounter
    ) -> Tensor:
        return policy.token_stats(packed, codec=codec, step=step, temperature=self.temperature, wire=wire).logprobs

    def _backward(
        self,
        step: int,
        batch: RolloutBatch,
        update: list[Microbatch],
        targets: Targets,
        codec: BoundaryCodec,
        wire: WireCounter,
        *,
        forget: bool,
    ) -> _Totals:
        """The gradient of one update's loss into the parameters; `forget` drops each microbatch's masks behind it."""
        self.optimizer.zero_grad(set_to_none=True)
        weights = targets.weights(torch.cat([micro.rows for micro in update]), self.config)
        totals = _Totals()
        for micro in update:
            rows = micro.rows
            stats = self.policy.token_stats(
                micro.packed, codec=codec, step=step, temperature=self.temperature, wire=wire
            )
            # With a single pass over the data the old log-probs are these ones: the ratio is exactly 1.
            old = stats.logprobs.detach() if micro.old is None else micro.old
            sampler = batch.flat_logprobs(rows)
            reference = None
            if self.config.grpo.kl_coef > 0:
                reference = self._frozen(self.reference, micro.packed, codec, step, wire)
            part = microbatch_loss(
                stats.logprobs,
                old,
                sampler,
                reference,
                targets.advantages[rows],
                weights[rows],
                targets.counts[rows],
                self.config.grpo,
            )
            part.loss.backward()
            totals.loss += float(part.loss.detach())
            totals.clipped += part.clipped
            totals.corrected += part.corrected
            totals.entropy += float(stats.entropy.sum())
            totals.mismatch += float((old - sampler).abs().sum())
            totals.ratio_error = max(totals.ratio_error, part.ratio_error)
            if forget:
                micro.packed.tokens.cache.clear()
        return totals

    def _dense_gradient(
        self, step: int, batch: RolloutBatch, update: list[Microbatch], targets: Targets, wire: WireCounter
    ) -> dict[str, Tensor] | None:
        """What the update's gradient would be without a codec; None unless a gradient probe is due."""
        every = self.config.probe.gradient_every
        if not every or self.dense_step(step) or (step != 1 and step % every):
            return None
        self._backward(step, batch, update, targets, DenseCodec(), wire, forget=False)
        return take_gradients(dict(self.decoder.named_parameters()))

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.decoder.named_parameters() if p.grad is not None}

    def _apply(self, signs: Mapping[str, Tensor] | None, probe: GradientProbe | None) -> _Applied:
        """Clip, correct, step."""
        parameters = dict(self.decoder.named_parameters())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), self.config.optimizer.clip_norm))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return _Applied(norm=norm, ok=False)
        agreement = None
        if signs is not None:
            agreement = correct_gradients(parameters, signs, self.config.anchor.blend)
        views = None if probe is None else probe.views(self._gradients(), signs)
        self.optimizer.step()
        return _Applied(1, norm, True, agreement, views)

    def _probe_views(
        self, step: int, batch: RolloutBatch, rows: Tensor, codec: BoundaryCodec, wire: WireCounter
    ) -> ViewProbe:
        """KL to the reference through the codec on every step, and everything without it on probe steps.

        Reads the first rows of the batch only: the reference passes are for the reader, not for the gradient. Their
        bytes are counted apart for the same reason.
        """
        rows = rows[: self.config.probe.rows]
        packed = pack_rows(batch, rows)
        return probe_views(
            self.policy,
            self.reference,
            packed,
            batch.flat_logprobs(rows),
            codec,
            step,
            self.temperature,
            dense=step == 1 or step % self.config.probe.every == 0,
            wire=wire,
        )


@dataclass
class _Totals:
    """Sums over response tokens of one update, or of a step's updates."""

    loss: float = 0.0
    clipped: int = 0
    corrected: int = 0
    entropy: float = 0.0
    mismatch: float = 0.0
    ratio_error: float = 0.0

    def add(self, part: _Totals, *, first: bool, first_epoch: bool) -> None:
        self.loss += part.loss
        self.clipped += part.clipped
        self.corrected += part.corrected
        if first_epoch:
            self.entropy += part.entropy
            self.mismatch += part.mismatch
        if first:  # later updates have moved away from the old log-probs: there a ratio is not an error
            self.ratio_error = part.ratio_error


@dataclass
class _Applied:
    """What became of the updates of a step: how many were applied, the last one's norm and sign agreement, and the
    first one's gradient probe."""

    count: int = 0
    norm: float = 0.0
    ok: bool = True
    agreement: float | None = None
    views: GradientViews | None = None

    def add(self, part: _Applied) -> None:
        self.count += part.count
        self.norm, self.ok, self.agreement = part.norm, part.ok, part.agreement
        self.views = self.views or part.views
