"""Collects the rollouts of a step: problems to requests, responses to a scored batch, the batch to the board.

Runs ahead of the trainer: `request(step)` starts sampling in the background, `wait(step)` returns the durable batch.
`sprawl.run.stream` is the collector whose groups belong to no step until a step takes them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sprawl.board import keys
from sprawl.board.records import IslandRecord
from sprawl.board.store import MissingKey, Store
from sprawl.config import RunConfig
from sprawl.policy import Tokenizer
from sprawl.problems import ProblemSet
from sprawl.rollout.client import RolloutClient
from sprawl.rollout.trajectories import RolloutBatch, Sampled, load_batch, to_bytes
from sprawl.rollout.wire import VersionPolicy
from sprawl.run.groups import Group, GroupSampler, episode_batch, join, make_batch
from sprawl.train.losses.selection import plan_refill
from sprawl.train.prf import derive_key

__all__ = [
    "Collected",
    "Collector",
    "episode_batch",
    "make_batch",
    "prompt_numbers",
    "sample_seed",
    "version_policy",
]

T = TypeVar("T")

IDLE_S = 0.5


def sample_seed(run_seed: int, problem: int, sample: int, step: int) -> int:
    """The sampling seed of one sample: a 62-bit function of where it stands, so that a resumed run draws it again."""
    return derive_key(derive_key(run_seed, step, problem) >> 1, 0, sample) >> 2


def version_policy(config: RunConfig, step: int) -> VersionPolicy:
    """Versions that may sample for step `step` (which trains version step-1): at most `max_staleness` behind.

    Pinned to exactly the stalest one in deterministic mode, because that one is known when the request is sent.
    """
    version = max(0, step - 1 - config.rollout.max_staleness)
    if config.deterministic:
        return VersionPolicy(exact_version=version)
    return VersionPolicy(min_version=version)


def prompt_numbers(config: RunConfig, step: int, round_: int) -> range:
    """Numbers of the training problems that round `round_` of sampling for a step draws from: the step's own in round
    0; the rounds that refill it take theirs from behind the last step's, so that no step sees another's."""
    prompts, rounds = config.rollout.prompts, config.grpo.refill_rounds
    if round_ == 0:
        return range((step - 1) * prompts, step * prompts)
    first = (config.steps + (step - 1) * rounds + round_ - 1) * prompts
    return range(first, first + prompts)


@dataclass(frozen=True)
class Collected:
    batch: RolloutBatch
    reused: bool  # it was on the board already
    seconds: float  # first request sent to durable; of a stream, the longest that a group of it was sampled for


@dataclass(frozen=True)
class SamplingJob:
    """What a run samples: problems, how they become tokens and where a sample ends, which islands it asks and which
    board its batches go to. `discover` returns the islands there are now."""

    config: RunConfig
    store: Store
    run_id: str
    tokenizer: Tokenizer
    problems: ProblemSet
    stop_ids: list[int]
    discover: Callable[[], list[IslandRecord]]


class Collector:
    """Owns a client and the event loop thread it lives in."""

    def __init__(self, job: SamplingJob) -> None:
        self.job = job
        self.config = job.config
        self._pending: dict[int, Future[Collected]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="collector", daemon=True)
        self._thread.start()
        self.client: RolloutClient = self.run(self._open_client())
        self.sampler = GroupSampler(self.client, job.config.rollout, job.tokenizer, job.problems, job.stop_ids)

    async def _open_client(self) -> RolloutClient:
        rollout = self.config.rollout
        return RolloutClient(
            self.job.discover, timeout_s=rollout.timeout_s, hedge=rollout.hedge, continuation=rollout.continuation
        )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the collector's loop and wait for it (evaluations share the client this way)."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def request(self, step: int) -> None:
        """Start sampling for a step in the background; asking twice is asking once.

        Pinned versions are sampled in the order of the steps: islands only go forward, and a later step's request would
        carry them past what an earlier one still waits for.
        """
        if step not in self._pending:
            before = self._pending.get(step - 1) if self.config.deterministic else None
            self._pending[step] = asyncio.run_coroutine_threadsafe(self._collect_after(before, step), self._loop)

    def wait(self, step: int, idle: Callable[[], None] = lambda: None) -> Collected:
        """The batch of a step, once it is on the board; `idle` is called meanwhile, twice a second.

        Raises what sampling it or `idle` raised; it can then be asked again.
        """
        self.request(step)
        try:
            while not wait([self._pending[step]], IDLE_S).done:
                idle()
            return self._pending[step].result()
        except BaseException:
            self._pending.pop(step, None)
            raise

    def run_ahead(self, step: int) -> None:
        """`step` is about to be trained: start sampling what may be sampled meanwhile. It may be stale by up to
        max_staleness versions, never more."""
        for ahead in range(step + 1, min(step + self.config.rollout.max_staleness, self.config.steps) + 1):
            self.request(ahead)

    def settle(self) -> None:
        """Wait until nothing is being sampled that holds islands back, so that they may move on."""
        for future in list(self._pending.values()):
            future.exception()

    def published(self, step: int) -> None:
        """Version `step` can be had. Batches up to that step are dropped from memory; they stay on the board."""
        for key in [key for key in self._pending if key <= step]:
            del self._pending[key]

    def load(self, step: int) -> RolloutBatch:
        """A batch from the board. Raises MissingKey."""
        return load_batch(self.job.store, self.job.run_id, step)

    def close(self) -> None:
        for future in self._pending.values():
            future.cancel()
        if self._thread.is_alive():
            try:
                asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(5)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(5)

    async def _shut(self) -> None:
        await self.client.close()

    async def _collect_after(self, before: Future[Collected] | None, step: int) -> Collected:
        if before is not None:
            await asyncio.wrap_future(before)
        return await self._collect(step)

    async def _collect(self, step: int) -> Collected:
        started = time.perf_counter()
        try:
            return Collected(self.load(step), True, time.perf_counter() - started)
        except MissingKey:
            pass
        rounds, wanted = self.config.grpo.refill_rounds, self.config.rollout.prompts
        sampled: list[Group] = []
        missing = wanted
        for number in range(rounds + 1):
            sampled += await self._sample(step, prompt_numbers(self.config, step, number)[:missing])
            plan = plan_refill([group.informative for group in sampled], wanted, rounds - number)
            missing = plan.missing
            if not missing:
                break
        batch = join(step, [sampled[place] for place in plan.keep])
        if len(sampled) > wanted:
            scores = [row.reward for group in sampled for row in group.rows]
            batch = replace(batch, draws=Sampled(len(sampled), sum(scores) / len(scores)))
        # Written before anyone trains on it; when two trainers raced, the batch that is there is the batch.
        if not self.job.store.create(keys.rollouts(self.job.run_id, step), to_bytes(batch)):
            batch = self.load(step)
        return Collected(batch, False, time.perf_counter() - started)

    async def _sample(self, step: int, numbers: range) -> list[Group]:
        """A group a prompt number, scored."""
        problems = [self.job.problems.train(number) for number in numbers]
        seeds = [
            [sample_seed(self.config.seed, problem.index, s, step) for s in range(self.config.rollout.samples)]
            for problem in problems
        ]
        return await self.sampler.sample(problems, seeds, version_policy(self.config, step))
