"""Collects the rollouts of a step: problems to requests, responses to a scored batch, the batch to the board.

Runs ahead of the trainer: `request(step)` starts sampling in the background, `wait(step)` returns the durable batch.
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
from sprawl.episodes import Episode, EpisodeRunner, trajectory
from sprawl.policy import Tokenizer
from sprawl.problems import Problem, ProblemSet, ToolProblemSet, response_text
from sprawl.rollout.client import RolloutClient
from sprawl.rollout.trajectories import (
    RolloutBatch,
    Sampled,
    Span,
    Trajectory,
    batch_of,
    expert_tensor,
    load_batch,
    to_bytes,
)
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, SamplingParams, VersionPolicy
from sprawl.train.losses.selection import plan_refill
from sprawl.train.prf import derive_key

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


def make_batch(
    step: int,
    problems: list[Problem],
    requests: list[GenerateRequest],
    responses: list[GenerateResponse],
    scores: list[list[float]],
) -> RolloutBatch:
    """Responses and scores, a group each, as padded tensors."""
    groups = zip(problems, requests, responses, scores, strict=True)
    return _join(step, [_response_group(*group) for group in groups])


def episode_batch(step: int, groups: list[list[Episode]]) -> RolloutBatch:
    """Episodes, a group each, as padded tensors. Raises SprawlError as `sprawl.episodes.trajectory` does."""
    return _join(step, [_episode_group(group) for group in groups])


@dataclass(frozen=True)
class _Group:
    """The scored samples of one prompt, and the island that answered last."""

    rows: list[Trajectory]
    island: str

    @property
    def informative(self) -> bool:
        """Whether its samples scored differently."""
        return len({row.reward for row in self.rows}) > 1


def _response_group(
    problem: Problem, request: GenerateRequest, response: GenerateResponse, scores: list[float]
) -> _Group:
    rows = [
        Trajectory(
            prompt=request.input_ids or [],
            response=sample.token_ids,
            logprobs=sample.logprobs,
            mask=[True] * len(sample.token_ids),
            spans=[
                Span(span.version, span.start, span.end, span.island_id or response.island_id) for span in sample.spans
            ],
            reward=score,
            group=problem.index,
            seed=seed,
            finish="unknown" if sample.finish_reason == "abort" else sample.finish_reason,
            experts=None if sample.routed_experts is None else expert_tensor(sample.routed_experts),
        )
        for sample, score, seed in zip(response.samples, scores, request.sampling_params.seeds or [], strict=True)
    ]
    return _Group(rows, response.island_id)


def _episode_group(group: list[Episode]) -> _Group:
    return _Group([trajectory(episode, group=episode.problem.index) for episode in group], group[-1].islands[-1])


def _join(step: int, groups: list[_Group]) -> RolloutBatch:
    return batch_of(step, [row for group in groups for row in group.rows], [group.island for group in groups])


@dataclass(frozen=True)
class Collected:
    batch: RolloutBatch
    reused: bool  # it was on the board already
    seconds: float  # from the first request sent to durable


class Collector:
    """Owns a client and the event loop thread it lives in."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        run_id: str,
        tokenizer: Tokenizer,
        problems: ProblemSet,
        stop_ids: list[int],
        discover: Callable[[], list[IslandRecord]],
    ) -> None:
        self.config = config
        self.store = store
        self.run_id = run_id
        self.tokenizer = tokenizer
        self.problems = problems
        self.stop_ids = stop_ids
        self._discover = discover
        self._pending: dict[int, Future[Collected]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="collector", daemon=True)
        self._thread.start()
        self.client: RolloutClient = self.run(self._open_client())

    async def _open_client(self) -> RolloutClient:
        rollout = self.config.rollout
        return RolloutClient(
            self._discover, timeout_s=rollout.timeout_s, hedge=rollout.hedge, continuation=rollout.continuation
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
            self._pending[step] = asyncio.run_coroutine_threadsafe(self._collect(step, before), self._loop)

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

    def settle(self) -> None:
        """Wait until nothing is being sampled, so that islands may move on."""
        for future in list(self._pending.values()):
            future.exception()

    def forget(self, step: int) -> None:
        """Drop batches up to a step from memory; they stay on the board."""
        for key in [key for key in self._pending if key <= step]:
            del self._pending[key]

    def load(self, step: int) -> RolloutBatch:
        """A batch from the board. Raises MissingKey."""
        return load_batch(self.store, self.run_id, step)

    def close(self) -> None:
        for future in self._pending.values():
            future.cancel()
        if self._thread.is_alive():
            try:
                asyncio.run_coroutine_threadsafe(self.client.close(), self._loop).result(5)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(5)

    async def _collect(self, step: int, before: Future[Collected] | None) -> Collected:
        if before is not None:
            await asyncio.wrap_future(before)
        started = time.perf_counter()
        try:
            return Collected(self.load(step), True, time.perf_counter() - started)
        except MissingKey:
            pass
        rounds, wanted = self.config.grpo.refill_rounds, self.config.rollout.prompts
        sampled: list[_Group] = []
        missing = wanted
        for number in range(rounds + 1):
            sampled += await self._sample(step, prompt_numbers(self.config, step, number)[:missing])
            plan = plan_refill([group.informative for group in sampled], wanted, rounds - number)
            missing = plan.missing
            if not missing:
                break
        batch = _join(step, [sampled[place] for place in plan.keep])
        if len(sampled) > wanted:
            scores = [row.reward for group in sampled for row in group.rows]
            batch = replace(batch, draws=Sampled(len(sampled), sum(scores) / len(scores)))
        # Written before anyone trains on it; when two trainers raced, the batch that is there is the batch.
        if not self.store.create(keys.rollouts(self.run_id, step), to_bytes(batch)):
            batch = self.load(step)
        return Collected(batch, False, time.perf_counter() - started)

    async def _sample(self, step: int, numbers: range) -> list[_Group]:
        """Ask islands for a group a prompt number, or play its episodes, and score them."""
        rollout = self.config.rollout
        problems = [self.problems.train(number) for number in numbers]
        seeds = [
            [sample_seed(self.config.seed, problem.index, s, step) for s in range(rollout.samples)]
            for problem in problems
        ]
        policy = version_policy(self.config, step)
        if isinstance(self.problems, ToolProblemSet):
            runner = EpisodeRunner(
                self.client,
                self.tokenizer,
                self.problems,
                max_new_tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                route=rollout.episodes,
            )
            return [_episode_group(group) for group in await runner.run_many(problems, seeds, policy)]
        requests = [
            GenerateRequest(
                input_ids=self.tokenizer.encode(problem.prompt),
                sampling_params=SamplingParams(
                    n=rollout.samples,
                    max_new_tokens=rollout.max_new_tokens,
                    temperature=rollout.temperature,
                    seeds=of_problem,
                    stop_token_ids=self.stop_ids,
                ),
                weight_version=policy,
            )
            for problem, of_problem in zip(problems, seeds, strict=True)
        ]
        responses = await self.client.generate_many(requests)
        return [
            _response_group(
                problem,
                request,
                response,
                [
                    self.problems.score(problem, response_text(self.tokenizer, sample.token_ids))
                    for sample in response.samples
                ],
            )
            for problem, request, response in zip(problems, requests, responses, strict=True)
        ]
