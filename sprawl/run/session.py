"""A run in progress: what one process does, phase by phase, whoever drives it (a loop, a Prefect flow, a test).

Phases of a step: `collect` -> `train` -> `publish`. The manifest of version t is the commit point of optimizer step
t; everything a step needs to be computed again (its rollouts, the sign map it used) is on the board before it. So a
run killed anywhere resumes from its newest checkpoint by replaying the committed steps after it, and each optimizer
step counts exactly once, whatever is retried.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sprawl import __version__
from sprawl.anchor.forecast import last_fire
from sprawl.board.fence import FencedStore
from sprawl.board.ledger import Ledger, resolve_run
from sprawl.board.reader import VersionReader
from sprawl.board.records import EvaluationRecord, EventRecord, RunRecord, StepRecord
from sprawl.board.signing import Signer, Trust, environment_keys
from sprawl.board.store import Store, open_store
from sprawl.board.verify import verify_board
from sprawl.config import RunConfig, parse_config
from sprawl.delta.state import root_digest, served_view, tensor_digests
from sprawl.errors import ConfigError, Diverged, SprawlError
from sprawl.evaluate.harness import evaluate_version
from sprawl.policy import Tokenizer
from sprawl.policy.checkpoint import drop_tied_head, load_auxiliary, load_weights, read_architecture
from sprawl.policy.fetch import ensure_base
from sprawl.problems import load_problem_set
from sprawl.report.data import load_run
from sprawl.report.violations import find_violations
from sprawl.rollout.trajectories import RolloutBatch, load_batch
from sprawl.run.base_model import BaseModel
from sprawl.run.collector import Collected, Collector
from sprawl.run.controller import Controller
from sprawl.run.crew import Crew
from sprawl.run.endpoint import Endpoint, bind_wanted
from sprawl.run.export import MetricsExport
from sprawl.run.fleet import Fleet, FleetContext, open_fleet
from sprawl.run.launch import launched_processes
from sprawl.run.metrics import TrainerMetrics
from sprawl.run.multi import MultiProcess
from sprawl.run.options import RunOptions, new_run_id
from sprawl.run.receipts import CollectReceipt, FinishReceipt, PublishReceipt, StartReceipt, TrainReceipt
from sprawl.run.signs import SignMaps
from sprawl.run.step_record import step_record
from sprawl.run.stream import open_collector
from sprawl.run.trainers import RunTrainer, SingleProcess
from sprawl.train.checkpoint import bases_of, delete_checkpoint, surplus
from sprawl.train.trainer import StepStats

log = logging.getLogger(__name__)


class RunSession:
    """Opened by `open`, brought to life by `prepare`, always ended by `close`."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        board: str,
        run_id: str,
        *,
        resumed: bool,
        log_dir: Path,
        fleet: Fleet,
        signer: Signer | None,
        trust: Trust | None,
    ) -> None:
        self.config = config
        self.store: Store = store
        self.board = board
        self.run_id = run_id
        self.resumed = resumed
        self.log_dir = log_dir
        self.ledger = Ledger(store, run_id)
        self.signer, self.trust = signer, trust
        self.reader = VersionReader(store, run_id, trust=trust)
        self.crew = Crew(fleet, self.ledger, log_dir, self._event)
        self.head_step = 0
        self.epoch = 0
        self._trained: int = 0  # the step whose result the trainer holds
        self._stats: StepStats | None = None
        self._batch: RolloutBatch | None = None
        self._sign_bytes = 0
        self._bad_steps = 0
        self._seconds: dict[str, float] = {}
        self._step_started = 0.0
        self._closed = False
        self._collector: Collector | None = None
        self._trainer: RunTrainer | None = None
        self._export: MetricsExport | None = None
        self._metrics = TrainerMetrics(run_id, config.steps)
        self._endpoint: Endpoint | None = None

    # ---------------------------------------------------------------- opening

    @classmethod
    def open(cls, options: RunOptions, *, anchor_argv: tuple[str, ...] | None = None) -> RunSession:
        """Validate everything that can be validated and create (or find) the run. Starts no process.

        Raises SprawlError: missing board or run, wrong config, a base model that cannot be had, keys that do not fit.
        """
        signer, trust = environment_keys()
        token = os.environ.get("SPRAWL_TOKEN") or None
        listening = bind_wanted(options.metrics, token)
        if options.resume is not None:
            store = open_store(options.board)
            run_id = resolve_run(store, options.resume)
            config = parse_config(Ledger(store, run_id).run().config, f"run.json of {run_id}")
            _check_launch(config)
        else:
            if options.config is None:
                raise ConfigError("a new run needs a config", "give a YAML, or --resume RUN_ID")
            config = options.config
            _check_launch(config)
            run_id = options.run_id or new_run_id(config.name)
            load_problem_set(config.problems.name, config.seed, config.problems.params)
            base = ensure_base(config.policy.base, Path("models"), log.info)
            files = load_auxiliary(base)
            arch = read_architecture(files)
            arch.split(config.policy.stages, config.policy.split)
            Tokenizer.from_files(files)
            store = open_store(options.board, create=True, probe=True)
            _create_run(store, run_id, config, base)
        log_dir = options.log_dir or Path.cwd() / ".sprawl" / "logs" / run_id
        context = FleetContext(options.board, run_id, config, log_dir, anchor_argv)
        session = cls(
            config,
            store,
            options.board,
            run_id,
            resumed=options.resume is not None,
            log_dir=log_dir,
            fleet=open_fleet(options.fleet, context),
            signer=signer,
            trust=trust,
        )
        if listening is not None:
            session.serve_metrics(*listening, token)
        return session

    def serve_metrics(self, listener: socket.socket, url: str, token: str | None) -> None:
        """Answer Prometheus on `listener` until `close`."""
        self._endpoint = Endpoint(listener, self.run_id, self._render_metrics, self.ledger.islands, token)
        log.info("metrics for Prometheus: %s/metrics", url)

    def _render_metrics(self) -> str:
        sampler = self._collector
        return self._metrics.render(self.ledger.islands()) + (
            "" if sampler is None else sampler.client.metrics.render()
        )

    def prepare(self) -> StartReceipt:
        """Take the run over (fencing epoch), bring the trainer to the last committed step, start islands and anchor."""
        torch.set_num_threads(self.config.threads.trainer)
        self.epoch = self.ledger.acquire_epoch()
        # Whatever this process writes from here on stops when another one takes the run over.
        self.store = FencedStore(self.store, self.run_id, self.epoch)
        self.ledger = Ledger(self.store, self.run_id)
        record = self.ledger.run()
        base = BaseModel.load(self.config)
        self.tokenizer = Tokenizer.from_files(base.files)
        self.problems = load_problem_set(self.config.problems.name, self.config.seed, self.config.problems.params)
        self.stop_ids = sorted({i for text in self.problems.stop for i in self.tokenizer.ids_containing(text)})
        self._trainer = self._open_trainer(base)
        head = self.reader.head()
        if head is None:
            self.trainer.publish(0, {})
            head = 0
        shapes = {name: tuple(tensor.shape) for name, tensor in base.weights.items()}
        self.signs = SignMaps(self.store, self.ledger, self.config.anchor, shapes, f"see {self.log_dir}/anchor.log")
        self.control = Controller(self.config, self.ledger, self._event)
        self.signs.requested = self.control.requested
        self._checkpoint(0)
        self._parameters = record.parameters
        del base
        # Before the trainer catches up: processes take seconds to start. A finished run needs none.
        final = last_fire(self.config.steps, self.config.anchor.every)
        fires_missing = self.config.anchor.enabled and final > 0 and self.ledger.fire(final) is None
        self.crew.start(self.config.rollout.islands if self._needs_islands(head) else 0, fires_missing)
        replayed = self._catch_up(head)
        self._collector = open_collector(
            self.config, self.store, self.run_id, self.tokenizer, self.problems, self.stop_ids, self.ledger.islands
        )
        if self._needs_islands(head):
            self.crew.wait_for_island()
        if self._evaluation_missed(head):
            # The base model of a new run, or killed before an evaluation. The batches that older weights sample come
            # first: islands only go forward.
            behind = max(1, self.config.rollout.max_staleness) if head else 1
            for ahead in range(head + 1, min(head + behind, self.config.steps) + 1):
                self._wait_for_batch(ahead)
            evaluated = self.evaluate(head)
            log.info("evaluation at version %d: greedy accuracy %.3f", head, evaluated.accuracy)
        self._event("resume" if self.resumed else "start", f"epoch {self.epoch}", {"replayed": replayed})
        self._metrics.started(self.epoch, self.ledger.step(head))
        self._export = MetricsExport(self.store, self.run_id)
        self._step_started = time.perf_counter()
        return StartReceipt(
            run_id=self.run_id,
            head_step=self.head_step,
            steps=self.config.steps,
            resumed=self.resumed,
            replayed=replayed,
            parameters=record.parameters,
            boundary=self.trainer.describe_boundary(),
        )

    # ---------------------------------------------------------------- the phases of a step

    def collect(self, step: int) -> CollectReceipt:
        """Wait for the batch of `step`. Idempotent."""
        started = time.perf_counter()
        collected = self._wait_for_batch(step)
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

    def train(self, step: int) -> TrainReceipt:
        """Compute optimizer step `step`. Exactly once: a repeated call returns without touching the weights.

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
            batch = self._batch = self._wait_for_batch(step).batch
        self._sign_bytes = self.signs.take(step, self.crew.replace_lost)
        self._seconds["anchor_wait"] = time.perf_counter() - started
        steering = self.control.decide(step, self.signs.fire)
        self._sampler.run_ahead(step)
        computed = time.perf_counter()
        self._stats = self.trainer.train(step, batch, self.signs, steering)
        self._trained = step
        self._seconds["train"] = time.perf_counter() - computed
        self._bad_steps = 0 if self._stats.applied else self._bad_steps + 1
        if self._bad_steps >= self.config.optimizer.max_bad_steps:
            message = f"{self._bad_steps} steps in a row had a gradient that is not finite, last at step {step}"
            self._event("violation", message, step=step)
            raise Diverged(message, "lower optimizer.lr, or look at the mismatch in the report")
        return self._train_receipt(step, started, skipped=False)

    def publish(self, step: int) -> PublishReceipt:
        """Publish version `step`, commit the ledger record and, where due, write the checkpoint. Idempotent."""
        if step <= self.head_step:
            return self._published_receipt(step)
        if step != self._trained or self._stats is None or self._batch is None:
            raise SprawlError(f"step {step} has not been trained: nothing to publish")
        started = time.perf_counter()
        receipt = self.trainer.publish(step, {"sign_fire": self.signs.fire, **self.control.extra()})
        self._seconds["publish"] = time.perf_counter() - started
        started = time.perf_counter()
        self._checkpoint(step)
        self._seconds["checkpoint"] = time.perf_counter() - started
        self._seconds["total"] = time.perf_counter() - self._step_started
        record = self._record(step, self._batch, self._stats, receipt)
        self.ledger.write_step(record)
        self.control.observe(record)
        self._metrics.step(record)
        self._step_started = time.perf_counter()
        self.head_step = step
        self._seconds = {}
        self._sampler.published(step)
        if self._export is not None:
            self._export.step(step)
        self.crew.replace_lost()
        return receipt

    def evaluation_due(self, step: int) -> bool:
        return step % self.config.evaluate.every == 0 or step == self.config.steps

    def _evaluation_missed(self, head: int) -> bool:
        known = {record.version for record in self.ledger.evaluations()}
        return self.evaluation_due(head) and head not in known

    def _needs_islands(self, head: int) -> bool:
        return head < self.config.steps or self._evaluation_missed(head)

    def evaluate(self, step: int) -> EvaluationRecord:
        """Greedy accuracy on held-out problems at exactly version `step`. Idempotent."""
        for known in self.ledger.evaluations():
            if known.version == step:
                return known
        # Islands serve one version at a time: what still samples an older one finishes first.
        self._sampler.settle()
        record = self._sampler.run(
            evaluate_version(
                self._sampler.client,
                self.tokenizer,
                self.problems,
                version=step,
                step=step,
                limit=self.config.evaluate.problems,
                max_new_tokens=self.config.rollout.max_new_tokens,
                stop_token_ids=self.stop_ids,
                route=self.config.rollout.episodes,
            )
        )
        self.ledger.write_evaluation(record)
        self._metrics.evaluation(record)
        # Its seconds are its own, not the next step's.
        self._step_started = time.perf_counter()
        return record

    def finish(self) -> FinishReceipt:
        """Wait for the last fire, write down what the islands say, rebuild and check every version on the board, and
        hold the whole ledger against what a correct run can never say."""
        anchor = self.config.anchor
        if anchor.enabled and (fire := last_fire(self.config.steps, anchor.every)):
            self.signs.wait_for(fire, self.crew.replace_lost)
        for island in self.ledger.islands():
            self._event(
                "island_report",
                f"{island.island_id}: {island.versions_verified} of {island.versions_applied} versions verified",
                {
                    "island_id": island.island_id,
                    "versions_applied": island.versions_applied,
                    "versions_verified": island.versions_verified,
                },
            )
        asked = self._sampler.client.metrics
        retried = asked.attempts - asked.hedges - asked.groups
        message = f"{asked.groups} groups answered; {retried} attempts failed, {asked.hedges} were hedges"
        self._event("client_report", message, dict(asked.snapshot()))
        report = verify_board(self.store, self.run_id, trust=self.trust)
        self._event(
            "verify",
            f"{report.versions} versions rebuilt from {report.keyframes} keyframes",
            {"checked": report.versions, "keyframes": report.keyframes, "problems": report.problems},
        )
        violations = find_violations(load_run(self.store, self.run_id), finished=True)
        self._event("finish", f"{self.head_step} steps, {len(violations)} violations")
        if self._export is not None:
            self._export.finish(self.head_step)
        return FinishReceipt(self.run_id, self.head_step, report.versions, violations)

    def close(self) -> None:
        """Stop what this session started. Idempotent, also after a failure half-way through `prepare`."""
        if self._closed:
            return
        self._closed = True
        if self._endpoint is not None:
            self._endpoint.close()
        try:
            if self._collector is not None:
                self._collector.close()
        finally:
            try:
                if self._trainer is not None:
                    self._trainer.close()
            finally:
                self.crew.stop()

    # ---------------------------------------------------------------- resume

    def _catch_up(self, head: int) -> int:
        """Bring the trainer from the newest checkpoint to the committed head by replaying its steps.

        The replay must end in the very state that was published. If it does not (other hardware, another number of
        threads), the run goes on from the replayed masters; the next delta is still made against the published
        state, and the ledger says that it happened.
        """
        # A checkpoint whose step has no record yet (killed in between) is not the start: its step is measured again.
        checkpoints = [step for step in self.ledger.checkpoints() if step <= head]
        start = max(step for step in checkpoints if step == 0 or self.ledger.step(step) is not None)
        if start:
            self.trainer.restore(start)
        self._trained = self.head_step = start
        for step in range(start + 1, head + 1):
            manifest = self.reader.manifest(step)
            if manifest is None:
                raise SprawlError(f"version {step} of {self.run_id} is gone from the board: cannot replay to {head}")
            self._sign_bytes = self.signs.use(manifest.extra.get("sign_fire"))
            began = time.perf_counter()
            batch = load_batch(self.store, self.run_id, step)
            steering = self.control.replay(manifest.extra)
            self._batch, self._stats = batch, self.trainer.train(step, batch, self.signs, steering)
            self._trained = self.head_step = step
            self._seconds = {"train": time.perf_counter() - began, "total": time.perf_counter() - began}
            self._checkpoint(step)
        here, published = self.trainer.adopt(head)
        if here != published:
            message = f"replay to step {head} gave {here[:16]}, published was {published[:16]}"
            self._event("violation", message, step=head)
        if head > 0 and self.ledger.step(head) is None and self._stats is not None and self._batch is not None:
            # Killed between the commit and its ledger record: the replay has just measured the same step again.
            self.ledger.write_step(self._record(head, self._batch, self._stats, self._published_receipt(head)))
        self._seconds = {}
        if head > 0 and (manifest := self.reader.manifest(head)) is not None:
            self.control.recall(head, manifest.extra)
        return head - start

    def _published_receipt(self, version: int) -> PublishReceipt:
        manifest = self.reader.manifest(version)
        if manifest is None:
            raise SprawlError(f"version {version} of {self.run_id} is not on the board")
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

    # ---------------------------------------------------------------- small things

    @property
    def trainer(self) -> RunTrainer:
        if self._trainer is None:
            raise SprawlError("the session is not prepared")
        return self._trainer

    @property
    def _sampler(self) -> Collector:
        if self._collector is None:
            raise SprawlError("the session is not prepared")
        return self._collector

    def _wait_for_batch(self, step: int) -> Collected:
        return self._sampler.wait(step, self.trainer.check)

    def _open_trainer(self, base: BaseModel) -> RunTrainer:
        place = (self.config, self.store, self.ledger, base)
        epoch, signer, trust = self.epoch, self.signer, self.trust
        if self.config.policy.processes == 1:
            return SingleProcess(*place, epoch=epoch, signer=signer, trust=trust)
        board, log_dir = self.board, self.log_dir
        return MultiProcess(*place, board=board, log_dir=log_dir, epoch=epoch, signer=signer, trust=trust)

    def _checkpoint(self, step: int) -> None:
        if step % self.config.checkpoint.every and step != self.config.steps:
            return
        self.trainer.checkpoint(step)
        control = self.config.control
        grid = self.config.checkpoint.every if control.enabled and control.bring_forward else None
        needed = self.signs.checkpoints_needed(self.config.steps, grid)
        bases = partial(bases_of, self.ledger)
        for old in surplus(self.ledger.checkpoints(), self.config.checkpoint.keep, needed, bases):
            delete_checkpoint(self.store, self.run_id, old)

    def _train_receipt(self, step: int, started: float, *, skipped: bool) -> TrainReceipt:
        stats = self._stats
        return TrainReceipt(
            step=step,
            loss=stats.loss if stats else 0.0,
            grad_norm=stats.grad_norm if stats else 0.0,
            applied=stats.applied if stats else True,
            sign_fire=self.signs.fire,
            seconds=time.perf_counter() - started,
            skipped=skipped,
        )

    def _record(self, step: int, batch: RolloutBatch, stats: StepStats, receipt: PublishReceipt) -> StepRecord:
        return step_record(
            step,
            batch,
            stats,
            receipt,
            epoch=self.epoch,
            parameters=self._parameters,
            sign_fire=self.signs.fire,
            sign_weights=self.signs.weights_step,
            sign_bytes=self._sign_bytes,
            basis_bytes=self.signs.basis_bytes if self._sign_bytes else 0,
            seconds=self._seconds,
            control=self.control.record,
        )

    def _event(self, kind: str, message: str, data: dict[str, Any] | None = None, step: int | None = None) -> None:
        at = self.head_step if step is None else step
        record = EventRecord(kind=kind, at=time.time(), step=at, message=message, data=data or {})
        self.ledger.write_event(record)
        self._metrics.event(record)


def _check_launch(config: RunConfig) -> None:
    """Raises ConfigError when torchrun started another number of processes than the config needs."""
    launched, policy = launched_processes(), config.policy
    if launched not in (1, policy.processes):
        raise ConfigError(
            f"torchrun started {launched} processes; policy.runtime={policy.runtime}, stages={policy.stages} and "
            f"replicas={policy.replicas} need {policy.processes}",
            "change one of them, or start the run without torchrun",
        )


def _create_run(store: Store, run_id: str, config: RunConfig, base: Path) -> None:
    arch = read_architecture(load_auxiliary(base))
    weights = drop_tied_head(load_weights(base), arch)
    served = served_view(weights, config.publish.dtype)
    Ledger(store, run_id).create_run(
        RunRecord(
            run_id=run_id,
            created_at=time.time(),
            config=config.model_dump(mode="json"),
            base_digest=root_digest(tensor_digests(served)),
            parameters=sum(tensor.numel() for tensor in weights.values()),
            sprawl_version=__version__,
            host={"cores": os.cpu_count(), "platform": platform.platform(), "torch": torch.__version__},
        )
    )
