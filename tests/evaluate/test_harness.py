"""The evaluation harness against a client that answers from a script."""

from __future__ import annotations

import asyncio

import pytest

from sprawl.board.records import EvaluationRecord
from sprawl.errors import IntegrityError, SprawlError
from sprawl.evaluate import evaluate_version
from sprawl.problems import Problem, load_problem_set
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, Sample, VersionSpan

EOS = 0


class Characters:
    """Token ids are code points; 0 ends a text."""

    eos_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class ScriptedClient:
    """Adds correctly, except that every answer whose first operand is odd is reversed."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.requests: list[GenerateRequest] = []

    async def generate_many(self, requests: list[GenerateRequest]) -> list[GenerateResponse]:
        self.requests += requests
        return [self._answer(Characters().decode(request.input_ids or [])) for request in requests]

    def _answer(self, prompt: str) -> GenerateResponse:
        left, right = prompt.rstrip("=").split("+")
        text = f"{int(left) + int(right):03d}"
        ids = [*Characters().encode(text[::-1] if int(left) % 2 else text), EOS]
        span = VersionSpan(version=self.version, start=0, end=len(ids))
        sample = Sample(token_ids=ids, logprobs=[0.0] * len(ids), finish_reason="stop", spans=[span])
        return GenerateResponse(
            samples=[sample],
            weight_version_start=self.version,
            weight_version_end=self.version,
            island_id="island-0",
        )


def evaluate(client: ScriptedClient, version: int, limit: int) -> EvaluationRecord:
    return asyncio.run(
        evaluate_version(
            client,
            Characters(),
            load_problem_set("addition", 0, {}),
            version=version,
            step=12,
            limit=limit,
            max_new_tokens=8,
            stop_token_ids=[10],
        )
    )


def expected(problem: Problem) -> bool:
    return problem.meta["left"] % 2 == 0 or problem.answer == problem.answer[::-1]


def test_counts_what_the_verifier_pays_in_full() -> None:
    client = ScriptedClient(version=12)
    record = evaluate(client, 12, 60)
    correct = sum(expected(problem) for problem in load_problem_set("addition", 0, {}).heldout(60))
    assert 0 < correct < 60
    assert (record.version, record.step, record.problems, record.correct) == (12, 12, 60, correct)
    assert record.accuracy == correct / 60


def test_asks_for_one_greedy_sample_at_the_exact_version() -> None:
    client = ScriptedClient(version=3)
    evaluate(client, 3, 5)
    assert len(client.requests) == 5
    for request in client.requests:
        assert request.weight_version.exact_version == 3
        assert (request.sampling_params.n, request.sampling_params.temperature) == (1, 0.0)
        assert (request.sampling_params.max_new_tokens, request.sampling_params.stop_token_ids) == (8, [10])


def test_keeps_a_few_wrong_and_right_examples() -> None:
    examples = evaluate(ScriptedClient(version=0), 0, 200).examples
    assert [row["score"] for row in examples] == [0.0] * 4 + [1.0] * 4
    assert all(set(row) == {"prompt", "answer", "response", "score"} for row in examples)
    assert examples[-1]["response"] == examples[-1]["answer"]


def test_refuses_an_answer_of_another_version() -> None:
    with pytest.raises(IntegrityError, match="evaluation of version 5: island island-0 answered with versions 6 to 6"):
        evaluate(ScriptedClient(version=6), 5, 3)


def test_refuses_to_report_on_nothing() -> None:
    with pytest.raises(SprawlError, match="no held-out problems"):
        evaluate(ScriptedClient(version=0), 0, 0)
