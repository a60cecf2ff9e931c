"""What drives the steps of a run: each is trained once, published, recorded and, where due, kept as a checkpoint.

The manifest of version t is the commit point of optimizer step t; everything a step needs to be computed again (its
rollouts, the sign map it used) is on the board before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from sprawl.board.reader import VersionReader
from sprawl.board.records import StepRecord
from sprawl.errors import Diverged, SprawlError
from sprawl.rollout.trajectories import RolloutBatch, load_batch
from sprawl.run.collector import Collected, Collector
from sprawl.run.controller import Controller, Report
from sprawl.run.opening import TakenRun
from sprawl.run.receipts import CollectReceipt, PublishReceipt, TrainReceipt
from sprawl.run.signs import SignMaps
from sprawl.run.step_record import step_record
from sprawl.run.trainers import RunTrainer
from sprawl.train.checkpoint import bases_of, delete_checkpoint, surplus
from sprawl.train.trainer import StepStats


class Steps:
    """`head` is the newest committed step that the trainer has been through. `parameters`: of the model, for the size
    of a sign map. `report(kind, message, data, step)` writes an event to the ledger."""

    def __init__(
        self,
        run: TakenRun,
        reader: VersionReader,
        trainer: RunTrainer,
        signs: SignMaps,
        control: Controller,
        parameters: int,
        report: Report,
    ) -> None:
        self._run = run
        self._config, self._ledger = run.config, run.ledger
        self._reader = reader
        self._trainer = trainer
        self._signs = signs
        self._control = control
        self._parameters = parameters
        self._report = report
        self.head = 0
        self._trained = 0  # the step whose result the trainer holds
        self._stats: StepStats | None = None
        self._batch: RolloutBatch | None = None
        self._sign_bytes = 0
        self._bad_steps = 0
        self._seconds: dict[str, float] = {}
        self._started = 0.0

    def start_clock(self) -> None:
        """The wall seconds of the next step begin now."""
        self._started = time.perf_counter()

    # ---------------------------------------------------------------- the phases of a step

    def wait_for_batch(self, step: int, sampler: Collector) -> Collected:
        return sampler.wait(step, self._trainer.check)

    def collect(self, step: int, sampler: Collector) -> CollectReceipt:
        """Wait for the batch of `step`. Idempotent."""
        started = time.perf_counter()
        collected = self.wait_for_batch(step, sampler)
        waited = time.perf_counter() - started
        self._seconds["rollout_wait"] = waited
        self._seconds["rollout"] = collected.seconds
        batch = self._batch = collected.batch
        versions = sorted({int(v) for v in torch.cat((batch.version_start, batch.version_end)).unique()})
        return CollectReceipt(
            step=step,
            samples=batch.samples,
            reward=float(batch.rewards.mean()),
            tokens=batch.response_tokens,
            versions=versions,
            seconds=waited,
            reused=collected.reused,
        )

    def train(self, step: int, sampler: Collector, idle: Callable[[], None]) -> TrainReceipt:
        """Compute optimizer step `step`; `idle` is called while a sign map is waited for. Exactly once: a repeated call
        returns without touching the weights.

        Raises Diverged after `optimizer.max_bad_steps` refused steps in a row, Verdict when the drift controller stops
        the run before this step, SprawlError when steps are skipped.
        """
        started = time.perf_counter()
        if step <= self._trained:
            return self._train_receipt(step, started, skipped=True)
        if step != self._trained + 1:
            raise SprawlError(f"step {step} cannot be trained after step {self._trained}")
        batch = self._batch
        if batch is None or batch.step != step:
            batch = self._batch = self.wait_for_batch(step, sampler).batch
        self._sign_bytes = self._signs.take(step, idle)
        self._seconds["anchor_wait"] = time.perf_counter() - started
        steering = self._control.decide(step, self._signs.fire)
        sampler.run_ahead(step)
        computed = time.perf_counter()
        self._stats = self._trainer.train(step, batch, self._signs, steering)
        self._trained = step
        self._seconds["train"] = time.perf_counter() - computed
        self._bad_steps = 0 if self._stats.applied else self._bad_steps + 1
        if self._bad_steps >= self._config.optimizer.max_bad_steps:
            message = f"{self._bad_steps} steps in a row had a gradient that is not finite, last at step {step}"
            self._report("violation", message, {}, step)
            raise Diverged(message, "lower optimizer.lr, or look at the mismatch in the report")
        return self._train_receipt(step, started, skipped=False)

    def publish(self, step: int) -> tuple[PublishReceipt, StepRecord]:
        """Publish version `step`, which is behind `head`, commit its ledger record, and write the checkpoint where one
        is due."""
        if step != self._trained or self._stats is None or self._batch is None:
            raise SprawlError(f"step {step} has not been trained: nothing to publish")
        started = time.perf_counter()
        receipt = self._trainer.publish(step, {"sign_fire": self._signs.fire, **self._control.extra()})
        self._seconds["publish"] = time.perf_counter() - started
        started = time.perf_counter()
        self.checkpoint(step)
        self._seconds["checkpoint"] = time.perf_counter() - started
        self._seconds["total"] = time.perf_counter() - self._started
        record = self._record(step, self._batch, self._stats, receipt)
        self._ledger.write_step(record)
        self._control.observe(record)
        self.start_clock()
        self.head = step
        self._seconds = {}
        return receipt, record

    def published(self, version: int) -> PublishReceipt:
        """The receipt of a version that is on the board."""
        manifest = self._reader.manifest(version)
        if manifest is None:
            raise SprawlError(f"version {version} of {self._run.run_id} is not on the board")
        return PublishReceipt(
            version=version,
            step=manifest.step,
            kind=manifest.kind,
            sent_bytes=manifest.sent_bytes,
            full_bytes=manifest.full_bytes,
            changed_share=manifest.changed_share,
            root_digest=manifest.root_digest,
            seconds=0.0,
            already_committed=True,
        )

    def checkpoint(self, step: int) -> None:
        """Write the checkpoint of `step` where one is due, and delete those that nobody needs any more."""
        if step % self._config.checkpoint.every and step != self._config.steps:
            return
        self._trainer.checkpoint(step)
        control = self._config.control
        grid = self._config.checkpoint.every if control.enabled and control.bring_forward else None
        needed = self._signs.checkpoints_needed(self._config.steps, grid)
        bases = partial(bases_of, self._ledger)
        for old in surplus(self._ledger.checkpoints(), self._config.checkpoint.keep, needed, bases):
            delete_checkpoint(self._run.store, self._run.run_id, old)

    # ---------------------------------------------------------------- resume

    def catch_up(self, head: int) -> int:
        """Bring the trainer from the newest checkpoint to the committed head by replaying its steps; returns how many.

        The replay must end in the very state that was published. If it does not (other hardware, another number of
        threads), the run goes on from the replayed masters; the next delta is still made against the published
        state, and the ledger says that it happened.
        """
        # A checkpoint whose step has no record yet (killed in between) is not the start: its step is measured again.
        checkpoints = [step for step in self._ledger.checkpoints() if step <= head]
        start = max(step for step in checkpoints if step == 0 or self._ledger.step(step) is not None)
        if start:
            self._trainer.restore(start)
        self._trained = self.head = start
        for step in range(start + 1, head + 1):
            self._replay(step, head)
        here, published = self._trainer.adopt(head)
        if here != published:
            message = f"replay to step {head} gave {here[:16]}, published was {published[:16]}"
            self._report("violation", message, {}, head)
        if head > 0 and self._ledger.step(head) is None and self._stats is not None and self._batch is not None:
            # Killed between the commit and its ledger record: the replay has just measured the same step again.
            self._ledger.write_step(self._record(head, self._batch, self._stats, self.published(head)))
        self._seconds = {}
        if head > 0 and (manifest := self._reader.manifest(head)) is not None:
            self._control.recall(head, manifest.extra)
        return head - start

    def _replay(self, step: int, head: int) -> None:
        manifest = self._reader.manifest(step)
        if manifest is None:
            raise SprawlError(f"version {step} of {self._run.run_id} is gone from the board: cannot replay to {head}")
        self._sign_bytes = self._signs.use(manifest.extra.get("sign_fire"))
        began = time.perf_counter()
        batch = load_batch(self._run.store, self._run.run_id, step)
        steering = self._control.replay(manifest.extra)
        self._batch, self._stats = batch, self._trainer.train(step, batch, self._signs, steering)
        self._trained = self.head = step
        self._seconds = {"train": time.perf_counter() - began, "total": time.perf_counter() - began}
        self.checkpoint(step)

    # ---------------------------------------------------------------- small things

    def _train_receipt(self, step: int, started: float, *, skipped: bool) -> TrainReceipt:
        stats = self._stats
        return TrainReceipt(
            step=step,
            loss=stats.loss if stats else 0.0,
            grad_norm=stats.grad_norm if stats else 0.0,
            applied=stats.applied if stats else True,
            sign_fire=self._signs.fire,
            seconds=time.perf_counter() - started,
            skipped=skipped,
        )

    def _record(self, step: int, batch: RolloutBatch, stats: StepStats, receipt: PublishReceipt) -> StepRecord:
        return step_record(
            step,
            batch,
            stats,
            receipt,
            epoch=self._run.epoch,
            parameters=self._parameters,
            sign_fire=self._signs.fire,
            sign_weights=self._signs.weights_step,
            sign_bytes=self._sign_bytes,
            basis_bytes=self._signs.basis_bytes if self._sign_bytes else 0,
            seconds=self._seconds,
            control=self._control.record,
        )
