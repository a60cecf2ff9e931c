"""Greedy accuracy of one exact policy version on the held-out problems, sampled by the run's own islands."""

from __future__ import annotations

import itertools
import time
from typing import Any, Protocol

from sprawl.board.records import EvaluationRecord
from sprawl.episodes.record import Episode
from sprawl.episodes.routes import Kind
from sprawl.episodes.runner import Completer, EpisodeRunner
from sprawl.errors import IntegrityError, SprawlError
from sprawl.problems.base import Decoding, Problem, ProblemSet, ToolProblemSet, response_text
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, SamplingParams, VersionPolicy

EXAMPLES = 4  # rows of each kind, wrong and right, kept in the record


class Generator(Protocol):
    """The part of `RolloutClient` that an evaluation needs; it limits its own concurrency."""

    async def generate_many(self, requests: list[GenerateRequest]) -> list[GenerateResponse]: ...


class Encoding(Decoding, Protocol):
    def encode(self, text: str) -> list[int]: ...


async def evaluate_version(
    client: Generator,
    tokenizer: Encoding,
    problem_set: ProblemSet,
    *,
    version: int,
    step: int,
    limit: int,
    max_new_tokens: int,
    stop_token_ids: list[int],
    route: Kind = "tokens",
) -> EvaluationRecord:
    """Decode at most `limit` held-out problems greedily at exactly `version` and score them.

    A problem counts as correct when its verifier pays 1.0 in full; `accuracy` is their share. Raises SprawlError
    when no problem is held out, IntegrityError when an answer came from another version, and what the client raises
    when no island can serve the version in time. Problem sets with tools are played by `route`.
    """
    problems = problem_set.heldout(limit)
    if not problems:
        raise SprawlError(f"problem set {problem_set.name!r} has no held-out problems to evaluate (limit {limit})")
    started = time.monotonic()
    sampling = SamplingParams(n=1, max_new_tokens=max_new_tokens, temperature=0.0, stop_token_ids=stop_token_ids)
    policy = VersionPolicy(exact_version=version)
    if isinstance(problem_set, ToolProblemSet):
        if not isinstance(client, Completer):
            raise TypeError("problem sets with tools need a client with `complete`")
        runner = EpisodeRunner(client, tokenizer, problem_set, max_new_tokens, temperature=0.0, route=route)
        groups = await runner.run_many(problems, [[0]] * len(problems), policy)
        return _record([_episode_row(episodes[0]) for episodes in groups], version, step, started)
    responses = await client.generate_many(
        [
            GenerateRequest(input_ids=tokenizer.encode(problem.prompt), sampling_params=sampling, weight_version=policy)
            for problem in problems
        ]
    )
    rows = [
        _score(tokenizer, problem_set, problem, response, version)
        for problem, response in zip(problems, responses, strict=True)
    ]
    return _record(rows, version, step, started)


def _record(rows: list[dict[str, Any]], version: int, step: int, started: float) -> EvaluationRecord:
    correct = sum(row["score"] == 1.0 for row in rows)
    return EvaluationRecord(
        version=version,
        step=step,
        problems=len(rows),
        correct=correct,
        accuracy=correct / len(rows),
        seconds=time.monotonic() - started,
        finished_at=time.time(),
        examples=_examples(rows),
    )


def _score(
    tokenizer: Decoding, problem_set: ProblemSet, problem: Problem, response: GenerateResponse, version: int
) -> dict[str, Any]:
    start, end = response.weight_version_start, response.weight_version_end
    if start != version or end != version:
        raise IntegrityError(
            f"evaluation of version {version}: island {response.island_id} answered with versions {start} to {end}"
        )
    text = response_text(tokenizer, response.samples[0].token_ids)
    return {
        "prompt": problem.prompt,
        "answer": problem.answer,
        "response": text,
        "score": problem_set.score(problem, text),
    }


def _episode_row(episode: Episode) -> dict[str, Any]:
    """Versions were checked turn by turn against the exact one. The response is what a reader would have seen."""
    replies = itertools.chain(episode.replies, [""])
    texts = [part for turn, reply in zip(episode.turns, replies, strict=False) for part in (turn.text, reply)]
    return {
        "prompt": episode.problem.prompt,
        "answer": episode.problem.answer,
        "response": "".join(texts),
        "score": episode.reward,
    }


def _examples(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    wrong = [row for row in rows if row["score"] != 1.0]
    right = [row for row in rows if row["score"] == 1.0]
    return wrong[:EXAMPLES] + right[:EXAMPLES]
