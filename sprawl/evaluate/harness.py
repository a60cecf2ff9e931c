"""Greedy accuracy of one exact policy version on the held-out problems, sampled by the run's own islands."""

from __future__ import annotations

import time
from typing import Any, Protocol

from sprawl.board.records import EvaluationRecord
from sprawl.errors import IntegrityError, SprawlError
from sprawl.problems.base import Decoding, Problem, ProblemSet, response_text
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
) -> EvaluationRecord:
    """Decode at most `limit` held-out problems greedily at exactly `version` and score them.

    A problem counts as correct when its verifier pays 1.0 in full; `accuracy` is their share. Raises SprawlError
    when no problem is held out, IntegrityError when an answer came from another version, and what the client raises
    when no island can serve the version in time.
    """
    problems = problem_set.heldout(limit)
    if not problems:
        raise SprawlError(f"problem set {problem_set.name!r} has no held-out problems to evaluate (limit {limit})")
    started = time.monotonic()
    sampling = SamplingParams(n=1, max_new_tokens=max_new_tokens, temperature=0.0, stop_token_ids=stop_token_ids)
    policy = VersionPolicy(exact_version=version)
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


def _examples(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    wrong = [row for row in rows if row["score"] != 1.0]
    right = [row for row in rows if row["score"] == 1.0]
    return wrong[:EXAMPLES] + right[:EXAMPLES]
