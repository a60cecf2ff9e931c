"""A run in progress: what one process does, phase by phase, whoever drives it (a loop, a Prefect flow, a test).

Phases of a step: `collect` -> `train` -> `publish`. A run killed anywhere resumes from its newest checkpoint by
replaying the committed steps after it, and each optimizer step counts exactly once, whatever is retried
(`sprawl.run.steps`). How a run is opened is in `sprawl.run.opening`, how its books are closed in `sprawl.run.closing`.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from sprawl.anchor.forecast import last_fire
from sprawl.board.ledger import Ledger
from sprawl.board.reader import VersionReader
from sprawl.board.records import EvaluationRecord, EventRecord
from sprawl.errors import SprawlError
from sprawl.evaluate.harness import evaluate_version
from sprawl.policy import Tokenizer
from sprawl.problems import load_problem_set
from sprawl.run.base_model import BaseModel
from sprawl.run.closing import close_books
from sprawl.run.collector import Collector, SamplingJob
from sprawl.run.controller import Controller
from sprawl.run.crew import Crew
from sprawl.run.endpoint import Endpoint, bind_wanted
from sprawl.run.export import MetricsExport
from sprawl.run.metrics import TrainerMetrics
from sprawl.run.multi import open_trainer
from sprawl.run.opening import OpenedRun, TakenRun, open_run
from sprawl.run.options import RunOptions
from sprawl.run.receipts import CollectReceipt, FinishReceipt, PublishReceipt, StartReceipt, TrainReceipt
from sprawl.run.signs import SignMaps
from sprawl.run.steps import Steps
from sprawl.run.stream import open_collector

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Live:
    """What `prepare` brought to life."""

    run: TakenRun
    steps: Steps
    signs: SignMaps
    sampler: Collector
    export: MetricsExport


class RunSession:
    """Opened by `open`, brought to life by `prepare`, always ended by `close`."""

    def __init__(self, opened: OpenedRun) -> None:
        self._opened = opened
        self.config = opened.config
        self.store = opened.store
        self.board = opened.board
        self.run_id = opened.run_id
        self.log_dir = opened.log_dir
        self.ledger = Ledger(opened.store, opened.run_id)
        self.reader = VersionReader(opened.store, opened.run_id, trust=opened.trust)
        self.crew = Crew(opened.fleet, self.ledger, opened.log_dir, self._event)
        self._metrics = TrainerMetrics(opened.run_id, opened.config.steps)
        self._endpoint: Endpoint | None = None
        self._live: _Live | None = None
        self._closing = ExitStack()
        self._closing.callback(self.crew.stop)

    # ---------------------------------------------------------------- opening

    @classmethod
    def open(cls, options: RunOptions, *, anchor_argv: tuple[str, ...] | None = None) -> RunSession:
        """Validate everything that can be validated and create (or find) the run. Starts no process.

        Raises SprawlError: missing board or run, wrong config, a base model that cannot be had, keys that do not fit.
        """
        token = os.environ.get("SPRAWL_TOKEN") or None
        listening = bind_wanted(options.metrics, token)
        session = cls(open_run(options, anchor_argv))
        if listening is not None:
            session.serve_metrics(*listening, token)
        return session

    def serve_metrics(self, listener: socket.socket, url: str, token: str | None) -> None:
        """Answer Prometheus on `listener` until `close`."""
        self._endpoint = Endpoint(listener, self.run_id, self._render_metrics, self.ledger.islands, token)
        log.info("metrics for Prometheus: %s/metrics", url)

    def _render_metrics(self) -> str:
        page = self._metrics.render(self.ledger.islands())
        return page if self._live is None else page + self._live.sampler.client.metrics.render()

    def prepare(self) -> StartReceipt:
        """Take the run over (fencing epoch), bring the trainer to the last committed step, start islands and anchor."""
        torch.set_num_threads(self.config.threads.trainer)
        run = self._opened.take_over()
        self.store, self.ledger = run.store, run.ledger
        record = self.ledger.run()
        base = BaseModel.load(self.config)
        job = self._sampling_job(base)
        trainer = open_trainer(run, base)
        self._closing.callback(trainer.close)
        head = self.reader.head()
        if head is None:
            trainer.publish(0, {})
            head = 0
        shapes = {name: tuple(tensor.shape) for name, tensor in base.weights.items()}
        signs = SignMaps(self.store, self.ledger, self.config.anchor, shapes, f"see {self.log_dir}/anchor.log")
        control = Controller(self.config, self.ledger, self._event)
        signs.requested = control.requested
        steps = Steps(run, self.reader, trainer, signs, control, record.parameters, self._event)
        steps.checkpoint(0)
        del base
        # Before the trainer catches up: processes take seconds to start. A finished run needs none.
        final = last_fire(self.config.steps, self.config.anchor.every)
        fires_missing = self.config.anchor.enabled and final > 0 and self.ledger.fire(final) is None
        self.crew.start(self.config.rollout.islands if self._needs_islands(head) else 0, fires_missing)
        replayed = steps.catch_up(head)
        sampler = open_collector(job)
        self._closing.callback(sampler.close)
        self._live = _Live(run, steps, signs, sampler, MetricsExport(self.store, self.run_id))
        if self._needs_islands(head):
            self.crew.wait_for_island()
        if self._evaluation_missed(head):
            # The base model of a new run, or killed before an evaluation. The batches that older weights sample come
            # first: islands only go forward.
            behind = max(1, self.config.rollout.max_staleness) if head else 1
            for ahead in range(head + 1, min(head + behind, self.config.steps) + 1):
                steps.wait_for_batch(ahead, sampler)
            evaluated = self.evaluate(head)
            log.info("evaluation at version %d: greedy accuracy %.3f", head, evaluated.accuracy)
        resumed = self._opened.resumed
        self._event("resume" if resumed else "start", f"epoch {run.epoch}", {"replayed": replayed})
        self._metrics.started(run.epoch, self.ledger.step(head))
        steps.start_clock()
        return StartReceipt(
            run_id=self.run_id,
            head_step=self.head_step,
            steps=self.config.steps,
            resumed=resumed,
            replayed=replayed,
            parameters=record.parameters,
            boundary=trainer.describe_boundary(),
        )

    def _sampling_job(self, base: BaseModel) -> SamplingJob:
        tokenizer = Tokenizer.from_files(base.files)
        problems = load_problem_set(self.config.problems.name, self.config.seed, self.config.problems.params)
        stop_ids = sorted({i for text in problems.stop for i in tokenizer.ids_containing(text)})
        return SamplingJob(self.config, self.store, self.run_id, tokenizer, problems, stop_ids, self.ledger.islands)

    # ---------------------------------------------------------------- the phases of a step

    @property
    def head_step(self) -> int:
        """The last committed optimizer step; 0 before `prepare`."""
        return 0 if self._live is None else self._live.steps.head

    def collect(self, step: int) -> CollectReceipt:
        """Wait for the batch of `step`. Idempotent."""
        live = self._alive()
        return live.steps.collect(step, live.sampler)

    def train(self, step: int) -> TrainReceipt:
        """Compute optimizer step `step`. Exactly once: a repeated call returns without touching the weights.

        Raises Diverged after `optimizer.max_bad_steps` refused steps in a row, Verdict when the drift controller stops
        the run before this step, SprawlError when steps are skipped.
        """
        live = self._alive()
        return live.steps.train(step, live.sampler, self.crew.replace_lost)

    def publish(self, step: int) -> PublishReceipt:
        """Publish version `step`, commit the ledger record and, where due, write the checkpoint. Idempotent."""
        live = self._alive()
        if step <= self.head_step:
            return live.steps.published(step)
        receipt, record = live.steps.publish(step)
        self._metrics.step(record)
        live.sampler.published(step)
        live.export.step(step)
        self.crew.replace_lost()
        return receipt

    # ---------------------------------------------------------------- evaluation

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
        live = self._alive()
        # Islands serve one version at a time: what still samples an older one finishes first.
        live.sampler.settle()
        job = live.sampler.job
        record = live.sampler.run(
            evaluate_version(
                live.sampler.client,
                job.tokenizer,
                job.problems,
                version=step,
                step=step,
                limit=self.config.evaluate.problems,
                max_new_tokens=self.config.rollout.max_new_tokens,
                stop_token_ids=job.stop_ids,
                route=self.config.rollout.episodes,
            )
        )
        self.ledger.write_evaluation(record)
        self._metrics.evaluation(record)
        # Its seconds are its own, not the next step's.
        live.steps.start_clock()
        return record

    # ---------------------------------------------------------------- the end

    def finish(self) -> FinishReceipt:
        """Wait for the last fire, write down what the islands say, rebuild and check every version on the board, and
        hold the whole ledger against what a correct run can never say."""
        live, anchor = self._alive(), self.config.anchor
        if anchor.enabled and (fire := last_fire(self.config.steps, anchor.every)):
            live.signs.wait_for(fire, self.crew.replace_lost)
        finished = close_books(live.run, self.head_step, live.sampler.client.metrics, self._event)
        live.export.finish(self.head_step)
        return finished

    def close(self) -> None:
        """Stop what this session started, the last first. Idempotent, also after a failure half-way through
        `prepare`."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
        self._closing.close()

    # ---------------------------------------------------------------- small things

    def _alive(self) -> _Live:
        if self._live is None:
            raise SprawlError("the session is not prepared")
        return self._live

    def _event(self, kind: str, message: str, data: dict[str, Any] | None = None, step: int | None = None) -> None:
        at = self.head_step if step is None else step
        record = EventRecord(kind=kind, at=time.time(), step=at, message=message, data=data or {})
        self.ledger.write_event(record)
        self._metrics.event(record)
