"""Collects the rollouts of a step: problems to requests, responses to a scored batch, the batch to the board.

Runs ahead of the trainer: `request(step)` starts sampling in the background, `wait(step)` returns the durable batch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from sprawl.board import keys
from sprawl.board.records import IslandRecord
from sprawl.board.store import MissingKey, Store
from sprawl.config import RunConfig
from sprawl.policy import Tokenizer
from sprawl.problems import Problem, ProblemSet, response_text
from sprawl.rollout.client import RolloutClient
from sprawl.rollout.trajectories import RolloutBatch, Sampled, load_batch, to_bytes
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, SamplingParams, VersionPolicy
from sprawl.train.losses.selection import plan_refill
from sprawl.train.prf import derive_key

T = TypeVar("T")


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
    rows = [
        (number, request, sample, score, seed)
        for number, (request, response, marks) in enumerate(zip(requests, responses, scores, strict=True))
        for sample, score, seed in zip(response.samples, marks, request.sampling_params.seeds or [], strict=True)
    ]
    width = max(len(request.input_ids or []) + len(sample.token_ids) for _, request, sample, _, _ in rows)
    longest = max(len(sample.token_ids) for _, _, sample, _, _ in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.int32)
    logprobs = torch.zeros(len(rows), longest)
    for row, (_, request, sample, _, _) in enumerate(rows):
        ids = [*(request.input_ids or []), *sample.token_ids]
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        logprobs[row, : len(sample.logprobs)] = torch.tensor(sample.logprobs)

    def column(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return RolloutBatch(
        step=step,
        tokens=tokens,
        prompt_lengths=column([len(request.input_ids or []) for _, request, _, _, _ in rows]),
        response_lengths=column([len(sample.token_ids) for _, _, sample, _, _ in rows]),
        logprobs=logprobs,
        rewards=torch.tensor([score for _, _, _, score, _ in rows], dtype=torch.float32),
        groups=column([problems[number].index for number, _, _, _, _ in rows]),
        seeds=column([seed for _, _, _, _, seed in rows], torch.int64),
        version_start=column([sample.spans[0].version for _, _, sample, _, _ in rows]),
        version_end=column([sample.spans[-1].version for _, _, sample, _, _ in rows]),
        islands=tuple(response.island_id for response in responses),
        truncated=torch.tensor([sample.finish_reason == "length" for _, _, sample, _, _ in rows]),
    )


@dataclass(frozen=True)
class _Group:
    problem: Problem
    request: GenerateRequest
    response: GenerateResponse
    scores: list[float]


@dataclass(frozen=True)
class Collected:
    batch: RolloutBatch
    reused: bool  # it was on the board already
    seconds: float  # from request to durable


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
        return RolloutClient(self._discover, timeout_s=self.config.rollout.timeout_s)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the collector's loop and wait for it (evaluations share the client this way)."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def request(self, step: int) -> None:
        """Start sampling for a step in the background; asking twice is asking once."""
        if step not in self._pending:
            self._pending[step] = asyncio.run_coroutine_threadsafe(self._collect(step), self._loop)

    def wait(self, step: int) -> Collected:
        """The batch of a step, once it is on the board. Raises what sampling it raised; it can then be asked again."""
        self.request(step)
        try:
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

    async def _collect(self, step: int) -> Collected:
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
            plan = plan_refill([len(set(group.scores)) > 1 for group in sampled], wanted, rounds - number)
            missing = plan.missing
            if not missing:
                break
        chosen = [sampled[place] for place in plan.keep]
        batch = make_batch(
            step,
            [group.problem for group in chosen],
            [group.request for group in chosen],
            [group.response for group in chosen],
            [group.scores for group in chosen],
        )
        if len(sampled) > wanted:
            scores = [score for group in sampled for score in group.scores]
            batch = replace(batch, sampled=Sampled(len(sampled), sum(scores) / len(scores)))
        # Written before anyone trains on it; when two trainers raced, the batch that is there is the batch.
        if not self.store.create(keys.rollouts(self.run_id, step), to_bytes(batch)):
            batch = self.load(step)
        return Collected(batch, False, time.perf_counter() - started)

    async def _sample(self, step: int, numbers: range) -> list[_Group]:
        """One scored group a prompt number."""
        rollout = self.config.rollout
        problems = [self.problems.train(number) for number in numbers]
        requests = [
            GenerateRequest(
                input_ids=self.tokenizer.encode(problem.prompt),
                sampling_params=SamplingParams(
                    n=rollout.samples,
                    max_new_tokens=rollout.max_new_tokens,
                    temperature=rollout.temperature,
                    seeds=[sample_seed(self.config.seed, problem.index, s, step) for s in range(rollout.samples)],
                    stop_token_ids=self.stop_ids,
                ),
                weight_version=version_policy(self.config, step),
            )
            for problem in problems
        ]
        responses = await self.client.generate_many(requests)
        return [
            _Group(
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
