"""A group: the scored samples of one prompt, from the question to the rows of a batch. Whoever decides which prompts
are asked for, and for which step, does it elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sprawl.config import RolloutConfig
from sprawl.episodes import Episode, EpisodeRunner, trajectory
from sprawl.policy import Tokenizer
from sprawl.problems import Problem, ProblemSet, ToolProblemSet, response_text
from sprawl.rollout.client import RolloutClient
from sprawl.rollout.trajectories import RolloutBatch, Span, Trajectory, batch_of, expert_tensor
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, SamplingParams, VersionPolicy


@dataclass(frozen=True)
class Group:
    """The scored samples of one prompt, and the island that answered last."""

    rows: list[Trajectory]
    island: str

    @property
    def informative(self) -> bool:
        """Whether its samples scored differently."""
        return len({row.reward for row in self.rows}) > 1

    @property
    def oldest(self) -> int:
        """The lowest version that sampled a token of it."""
        return min(span.version for row in self.rows for span in row.spans)


def join(step: int, groups: Sequence[Group]) -> RolloutBatch:
    """Groups as the batch of a step. Raises ValueError as `batch_of` does."""
    return batch_of(step, [row for group in groups for row in group.rows], [group.island for group in groups])


def make_batch(
    step: int,
    problems: list[Problem],
    requests: list[GenerateRequest],
    responses: list[GenerateResponse],
    scores: list[list[float]],
) -> RolloutBatch:
    """Responses and scores, a group each, as padded tensors."""
    groups = zip(problems, requests, responses, scores, strict=True)
    return join(step, [response_group(*group) for group in groups])


def episode_batch(step: int, groups: list[list[Episode]]) -> RolloutBatch:
    """Episodes, a group each, as padded tensors. Raises SprawlError as `sprawl.episodes.trajectory` does."""
    return join(step, [episode_group(group) for group in groups])


def response_group(
    problem: Problem, request: GenerateRequest, response: GenerateResponse, scores: list[float]
) -> Group:
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
    return Group(rows, response.island_id)


def episode_group(group: list[Episode]) -> Group:
    return Group([trajectory(episode, group=episode.problem.index) for episode in group], group[-1].islands[-1])


@dataclass(frozen=True)
class GroupSampler:
    """Asks islands for groups, or plays their episodes, and scores them."""

    client: RolloutClient
    rollout: RolloutConfig
    tokenizer: Tokenizer
    problems: ProblemSet
    stop_ids: list[int]

    async def sample(self, problems: list[Problem], seeds: list[list[int]], policy: VersionPolicy) -> list[Group]:
        """A group a problem, a sample a seed. Raises SprawlError as the client does; the first group that fails for
        good cancels the rest."""
        rollout = self.rollout
        if isinstance(self.problems, ToolProblemSet):
            runner = EpisodeRunner(
                self.client,
                self.tokenizer,
                self.problems,
                max_new_tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                route=rollout.episodes,
            )
            return [episode_group(group) for group in await runner.run_many(problems, seeds, policy)]
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
            response_group(
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
