"""Rollouts as a stream (`rollout.feed: stream`): groups are asked for all the time, and a step trains on those that are
finished first and not too old.

Nothing here is bound to a step before its batch is taken. A batch is on the board, together with where it leaves the
stream, before anybody trains on it: a resumed run asks again for what was under way and goes on behind the last number
drawn, so that no group is trained twice and no prompt is passed over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from sprawl.board import keys
from sprawl.board.store import MissingKey
from sprawl.config import RunConfig
from sprawl.errors import IntegrityError, SprawlError
from sprawl.rollout.feed import FeedState
from sprawl.rollout.trajectories import RolloutBatch, Sampled, to_bytes
from sprawl.rollout.wire import VersionPolicy
from sprawl.run.collector import Collected, Collector, SamplingJob, sample_seed
from sprawl.run.groups import Group, join
from sprawl.run.pool import Asked, Choice, Pool, PoolLimits

log = logging.getLogger(__name__)

TRIES = 2
"""Requests of one group that may fail, each after all retries of the client, before the run is told."""


def pool_limits(config: RunConfig) -> PoolLimits:
    rollout = config.rollout
    return PoolLimits(
        wanted=rollout.prompts,
        max_staleness=rollout.max_staleness,
        in_flight=rollout.groups_in_flight,
        drops=rollout.prompts * config.grpo.refill_rounds,
        steps=config.steps,
    )


class StreamCollector(Collector):
    """A collector whose islands are never without work while the trainer can use it. The pool lives on the loop."""

    def __init__(self, job: SamplingJob) -> None:
        self._pool: Pool[Group] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        super().__init__(job)

    def run_ahead(self, step: int) -> None:
        """The stream is ahead by itself."""

    def published(self, step: int) -> None:
        super().published(step)
        self._loop.call_soon_threadsafe(self._newer, step)

    async def _collect(self, step: int) -> Collected:
        try:
            batch = await asyncio.to_thread(self.load, step)
        except MissingKey:
            pass
        else:
            self._adopt(step, batch)
            return Collected(batch, True, 0.0)
        pool = self._pool
        if pool is None:
            pool = self._pool = Pool(pool_limits(self.config), step - 1, await self._left_by(step - 1))
        pool.published(step - 1)
        choice = await self._choose(pool)
        batch = _batch(step, choice)
        data = to_bytes(batch)
        if await asyncio.to_thread(self.job.store.create, keys.rollouts(self.job.run_id, step), data):
            pool.commit(choice)
        else:  # two trainers raced, or the reply to our own write was lost: the batch that is there is the batch
            batch = await asyncio.to_thread(self.load, step)
            if to_bytes(batch) == data:
                pool.commit(choice)
            else:
                self._adopt(step, batch)
        self._pump()
        return Collected(batch, False, max(group.finished_at - group.asked_at for group in choice.groups))

    async def _left_by(self, step: int) -> FeedState | None:
        """Where the stream stands after the batch of `step`, which is on the board."""
        return None if step == 0 else self._state(await asyncio.to_thread(self.load, step))

    def _state(self, batch: RolloutBatch) -> FeedState:
        if batch.feed is None:
            key = keys.rollouts(self.job.run_id, batch.step)
            raise IntegrityError(f"{key} does not say where the stream stood: it is no batch of rollout.feed: stream")
        return batch.feed

    def _adopt(self, step: int, batch: RolloutBatch) -> None:
        """Go on from a batch that another process wrote, or this one in an earlier life."""
        if self._pool is None or self._pool.step != step:
            self._cancel()
            self._pool = Pool(pool_limits(self.config), step, self._state(batch))
            self._pool.published(step - 1)
            self._pump()

    async def _choose(self, pool: Pool[Group]) -> Choice[Group]:
        while (choice := pool.choose(time.monotonic())) is None:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            self._changed.clear()
            self._pump()
            await self._changed.wait()
        return choice

    def _newer(self, version: int) -> None:
        if self._pool is not None:
            self._pool.published(version)
            self._pump()

    def _pump(self) -> None:
        """Ask for as many groups as the pool has use for."""
        pool = self._pool
        assert pool is not None
        if pool.complete:
            self._cancel()
        while self._error is None and (asked := pool.ask(time.monotonic())) is not None:
            task = asyncio.ensure_future(self._ask(pool, asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, pool: Pool[Group], asked: Asked) -> None:
        try:
            problem = self.job.problems.train(asked.number)
            samples = range(self.config.rollout.samples)
            seeds = [sample_seed(self.config.seed, problem.index, sample, asked.number) for sample in samples]
            policy = VersionPolicy(min_version=asked.min_version)
            (group,) = await self.sampler.sample([problem], [seeds], policy)
        except Exception as error:  # the trainer is told when it next has to wait, whatever it is
            tries = pool.fail(asked.number)
            log.warning("group of prompt %d failed (%d. time): %s", asked.number, tries, error)
            if self._pool is pool and (tries >= TRIES or not isinstance(error, SprawlError)):
                self._error = error
        else:
            rewards = [row.reward for row in group.rows]
            pool.finish(
                asked.number,
                group,
                oldest=group.oldest,
                informative=group.informative,
                score=sum(rewards) / len(rewards),
                now=time.monotonic(),
            )
        if self._pool is pool:
            self._changed.set()
            self._pump()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _shut(self) -> None:
        self._cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super()._shut()


def _batch(step: int, choice: Choice[Group]) -> RolloutBatch:
    batch = replace(join(step, [group.value for group in choice.groups]), feed=choice.feed)
    if not choice.dropped:
        return batch
    groups = len(choice.groups) + choice.dropped
    score = choice.dropped_score + sum(group.score for group in choice.groups)
    return replace(batch, draws=Sampled(groups, score / groups))


def open_collector(job: SamplingJob) -> Collector:
    """The collector that `rollout.feed` names."""
    kind = StreamCollector if job.config.rollout.feed == "stream" else Collector
    return kind(job)
