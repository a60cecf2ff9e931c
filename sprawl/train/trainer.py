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
from sprawl.policy.stage import parameter_names
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.train import grpo
from sprawl.train.codecs import BoundaryCodec, DenseCodec, SubspaceCodec, WireCounter, make_codec
from sprawl.train.correction import Agreement, correct_gradient
from sprawl.train.losses.objective import Targets, make_targets, microbatch_loss
from sprawl.train.optimizer import RunOptimizer, build_optimizer, scale_learning_rate
from sprawl.train.passes import Alone, Crossing, Fabric, LocalPasses, Passes, Which
from sprawl.train.pipeline import StagedPolicy, TokenStats
from sprawl.train.plan import Microbatch, check_lengths, check_shares, cut, plan_updates
from sprawl.train.probe import GradientProbe, ViewProbe, compare_gradients, probe_views, take_gradients
from sprawl.train.steering import AS_CONFIGURED, Steering


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


class Trainer:
    """Policy, frozen reference and optimizer of one run, or of one stage of it.

    In a process of its own a stage has its slice of both decoders, `passes` that reach its neighbours and a `fabric`
    with all others; every process then makes the same calls. Without them the whole model is here.
    """

    def __init__(
        self,
        decoder: Decoder,
        reference: Decoder,
        config: RunConfig,
        *,
        passes: Passes | None = None,
        fabric: Fabric | None = None,
    ) -> None:
        self.config = config
        self.decoder = decoder
        self.reference = reference
        self.optimizer = make_optimizer(decoder, config)
        self.codec: BoundaryCodec = make_codec(config.boundary, config.seed)
        self.fabric: Fabric = fabric or Alone()
        self.passes: Passes = passes or local_passes(decoder, reference, config)
        self._all_names = parameter_names(decoder.arch)

    def use_bases(self, bases: Mapping[int, Tensor] | None) -> None:
        """Boundary bases of the newest fire; only the subspace codec has any."""
        if isinstance(self.codec, SubspaceCodec):
            self.codec.use(bases)

    def dense_step(self, step: int, steering: Steering) -> bool:
        """Whether every pass of the step runs through dense boundaries."""
        config = self.config.boundary
        return steering.dense or config.codec == "dense" or (config.dense_every > 0 and step % config.dense_every == 0)

    def step(
        self, step: int, batch: RolloutBatch, signs: Mapping[str, Tensor] | None, steering: Steering = AS_CONFIGURED
    ) -> StepStats:
        """Train on one batch: `epochs` x `minibatches` optimizer updates. All passes of the iteration (old, update,
        reference) use the masks of `step`.

        A gradient that is not finite is refused and ends the step: `applied` is False, and of several updates those
        before it stand (`updates` counts them). With one update nothing is changed.

        Raises SprawlError for a sample longer than the model or the token budget of a microbatch.
        """
        config = self.config.grpo
        lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
        limit = self.decoder.arch.max_positions
        check_lengths(batch, torch.arange(batch.samples), lengths, limit, "the model's max_position_embeddings")
        self.codec.begin(step)
        scale_learning_rate(self.optimizer, self.config.optimizer.lr, steering.lr_scale)
        codec = DenseCodec() if self.dense_step(step, steering) else self.codec
        crossing = Crossing(codec, step, self.config.rollout.temperature, WireCounter())
        probing = replace(crossing, wire=WireCounter())
        targets = make_targets(batch, self.config)
        updates = self.plan(batch)
        check_shares(min(len(update) for update in updates), self.fabric.replicas)
        shares = [update[self.fabric.replica :: self.fabric.replicas] for update in updates]
        views = self._probe_views(batch, probing, wanted=steering.probe)
        weights = [targets.weights(torch.cat([micro.rows for micro in update]), self.config) for update in updates]
        dense = self._dense_gradient(batch, shares[0], targets, weights[0], probing)
        if config.epochs * len(updates) > 1:
            shares = [self._with_old(share, crossing) for share in shares]
        totals, applied = _Totals(), _Applied()
        for number in range(len(updates) * config.epochs):
            place, last_epoch = number % len(updates), number >= len(updates) * (config.epochs - 1)
            part = self._backward(batch, shares[place], targets, weights[place], crossing, forget=last_epoch)
            totals.add(part, first=number == 0, first_epoch=number < len(updates))
            probe = None
            if dense is not None and number == 0:
                probe = compare_gradients(self._gradients(), dense, self.fabric)
            applied.add(self._apply(signs, probe, steering.blend(self.config.anchor.blend)))
            if not applied.ok:
                break
        self.fabric.sum_codec(self.codec)
        totals.settle(self.fabric, crossing.wire, probing.wire)
        tokens = batch.response_tokens
        return StepStats(
            loss=totals.loss / config.epochs,
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
            wire=crossing.wire,
            gradient=applied.views,
            dense_step=isinstance(codec, DenseCodec),
            updates=applied.count,
            off_policy_cut=None if config.off_policy.kind == "none" else totals.corrected / (tokens * config.epochs),
            probe_bytes=probing.wire.sent,
        )

    def plan(self, batch: RolloutBatch) -> list[list[Microbatch]]:
        """The updates of an epoch, see `plan_updates`."""
        return plan_updates(batch, self.config.grpo)

    def _with_old(self, share: list[Microbatch], crossing: Crossing) -> list[Microbatch]:
        old = self._taken("policy", share, crossing)
        return [replace(micro, old=old.get(number)) for number, micro in enumerate(share)]

    def _taken(self, which: Which, share: list[Microbatch], crossing: Crossing) -> dict[int, Tensor]:
        """Log-probs [m] of the tokens taken, by microbatch; empty where the last stage is elsewhere."""
        taken: dict[int, Tensor] = {}

        def keep(number: int, distribution: Tensor) -> None:
            taken[number] = distribution.gather(1, share[number].packed.targets[:, None]).squeeze(1)

        self.passes.read(which, [micro.packed for micro in share], crossing, keep)
        return taken

    def _backward(
        self,
        batch: RolloutBatch,
        share: list[Microbatch],
        targets: Targets,
        weights: Tensor,
        crossing: Crossing,
        *,
        forget: bool,
    ) -> _Totals:
        """The gradient of one update's loss into the parameters, from this replica's `share` of its microbatches and
        the others'; `forget` drops each microbatch's masks behind it."""
        self.optimizer.zero_grad(set_to_none=True)
        config, totals = self.config.grpo, _Totals()
        reference = self._taken("reference", share, crossing) if config.kl_coef > 0 else {}

        def loss(number: int, stats: TokenStats) -> Tensor:
            micro = share[number]
            # With a single pass over the data the old log-probs are these ones: the ratio is exactly 1.
            old = stats.logprobs.detach() if micro.old is None else micro.old
            sampler, rows = batch.flat_logprobs(micro.rows), micro.rows
            part = microbatch_loss(
                stats.logprobs,
                old,
                sampler,
                reference.get(number),
                targets.advantages[rows],
                weights[rows],
                targets.counts[rows],
                config,
            )
            totals.loss += float(part.loss.detach())
            totals.clipped += part.clipped
            totals.corrected += part.corrected
            totals.entropy += float(stats.entropy.sum())
            totals.mismatch += float((old - sampler).abs().sum())
            totals.ratio_error = max(totals.ratio_error, part.ratio_error)
            return part.loss

        self.passes.learn([micro.packed for micro in share], crossing, loss)
        self.fabric.sum_gradients(dict(self.decoder.named_parameters()))
        if forget:
            for micro in share:
                micro.packed.tokens.cache.clear()
        return totals

    def _dense_gradient(
        self, batch: RolloutBatch, share: list[Microbatch], targets: Targets, weights: Tensor, crossing: Crossing
    ) -> dict[str, Tensor] | None:
        """What the update's gradient would be without a codec; None unless a gradient probe is due."""
        every, step = self.config.probe.gradient_every, crossing.step
        if not every or isinstance(crossing.codec, DenseCodec) or (step != 1 and step % every):
            return None
        self._backward(batch, share, targets, weights, replace(crossing, codec=DenseCodec()), forget=False)
        return take_gradients(dict(self.decoder.named_parameters()))

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.decoder.named_parameters() if p.grad is not None}

    def _apply(self, signs: Mapping[str, Tensor] | None, probe: GradientProbe | None, blend: float) -> _Applied:
        """Clip, correct, step."""
        gradients = self._gradients()
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return _Applied(norm=norm, ok=False)
        torch.nn.utils.clip_grads_with_norm_(
            self.decoder.parameters(), self.config.optimizer.clip_norm, torch.tensor(norm)
        )
        agreement = None if signs is None else self._correct(gradients, signs, blend)
        views = None if probe is None else probe.views(gradients, signs)
        self.optimizer.step()
        return _Applied(1, norm, True, agreement, views)

    def _norm(self, gradients: Mapping[str, Tensor]) -> float:
        """L2 norm over the whole model. Every process contributes the norms of its tensors, and all of them reduce the
        same list in the model's order: the same bits however the model is split."""
        norms = torch.zeros(len(self._all_names), dtype=torch.float64)
        for place, name in enumerate(self._all_names):
            if name in gradients and self.fabric.counts(name):
                norms[place] = torch.linalg.vector_norm(gradients[name])
        return float(torch.linalg.vector_norm(self.fabric.add(norms).float()))

    def _correct(self, gradients: Mapping[str, Tensor], signs: Mapping[str, Tensor], blend: float) -> float:
        """The anchor's signs into the gradients; returns the share of elements that had them already."""
        sums = torch.zeros(2, dtype=torch.float64)
        for name, gradient in gradients.items():
            if name in signs:
                part = correct_gradient(gradient, signs[name], blend)
                if self.fabric.counts(name):
                    sums += torch.tensor([part.agreeing, part.nonzero], dtype=torch.float64)
        agreeing, nonzero = self.fabric.add(sums).tolist()
        return Agreement(int(agreeing), int(nonzero)).share

    def _probe_views(self, batch: RolloutBatch, crossing: Crossing, *, wanted: bool) -> ViewProbe:
        """KL to the reference through the codec on every step, and everything without it on probe steps.

        Reads the first rows of the batch only: the reference passes are for the reader, not for the gradient. Their
        bytes are counted apart for the same reason. One replica does it for all.
        """
        dense = wanted or crossing.step == 1 or crossing.step % self.config.probe.every == 0
        if self.fabric.replica == 0:
            probed = cut(batch, torch.arange(min(batch.samples, self.config.probe.rows)), self.config.grpo)
            sampler = [batch.flat_logprobs(micro.rows) for micro in probed]
            views = probe_views(self.passes, [micro.packed for micro in probed], sampler, crossing, dense=dense)
        else:
            views = ViewProbe(0.0)
        numbers = [views.kl, views.kl_dense or 0.0, views.entropy_dense or 0.0, views.mismatch_dense or 0.0]
        numbers = self.fabric.add(torch.tensor(numbers, dtype=torch.float64)).tolist()
        return ViewProbe(*numbers) if dense else ViewProbe(numbers[0])


def local_passes(decoder: Decoder, reference: Decoder, config: RunConfig) -> LocalPasses:
    """All stages that the config describes, in this process."""
    layers = decoder.arch.split(config.policy.stages, config.policy.split)
    compute = getattr(torch, config.policy.compute_dtype)
    return LocalPasses(
        StagedPolicy(decoder, layers, compute, recompute=config.policy.gradient_checkpointing),
        StagedPolicy(reference, layers, compute),
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

    def settle(self, fabric: Fabric, wire: WireCounter, probe_wire: WireCounter) -> None:
        """Over all processes: the sums, the counted bytes, and the largest ratio error."""
        mine = [self.loss, self.clipped, self.corrected, self.entropy, self.mismatch]
        for counter in (wire, probe_wire):
            mine += [counter.sent, counter.dense, counter.padding]
        summed = fabric.add(torch.tensor(mine, dtype=torch.float64)).tolist()
        self.loss, self.entropy, self.mismatch = summed[0], summed[3], summed[4]
        self.clipped, self.corrected = int(summed[1]), int(summed[2])
        for counter, counts in ((wire, summed[5:8]), (probe_wire, summed[8:11])):
            counter.sent, counter.dense, counter.padding = (int(count) for count in counts)
        self.ratio_error = fabric.largest(self.ratio_error)


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
