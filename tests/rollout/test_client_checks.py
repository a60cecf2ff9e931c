"""Answers that are not what was asked for, whatever else they claim. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from sprawl.rollout.client.checks import completion_fault, generation_fault
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, Sample, SamplingParams, VersionPolicy, VersionSpan


def response(spans: list[tuple[int, int, int]], claimed: tuple[int, int], **changes: Any) -> GenerateResponse:
    facts: dict[str, Any] = {
        "token_ids": [5, 6, 7, 8],
        "logprobs": [-0.5] * 4,
        "finish_reason": "length",
        "spans": [VersionSpan(version=version, start=start, end=end) for version, start, end in spans],
        **changes,
    }
    return GenerateResponse(
        samples=[Sample(**facts)],
        weight_version_start=claimed[0],
        weight_version_end=claimed[1],
        island_id="a",
        run_id="run-1",
    )


def asked(resume: list[list[int]] | None = None, **policy: Any) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=4 + len((resume or [[]])[0]), stop_token_ids=[9], resume=resume)
    return GenerateRequest(input_ids=[1], sampling_params=params, weight_version=VersionPolicy(**policy))


def test_an_honest_answer_passes() -> None:
    assert generation_fault(response([(3, 0, 4)], (3, 3)), asked(exact_version=3)) is None
    assert generation_fault(response([(3, 0, 1), (5, 1, 4)], (3, 5)), asked(min_version=3, run_id="run-1")) is None
    assert generation_fault(response([(3, 0, 4)], (3, 3)), asked([[7, 7]])) is None
    nothing_left = response([], (3, 3), token_ids=[], logprobs=[], finish_reason="stop")
    assert generation_fault(nothing_left, asked([[7, 9]])) is None


@pytest.mark.parametrize(
    ("answer", "request_", "said"),
    [
        (response([(3, 0, 4)], (4, 4)), asked(), "claims versions 4 to 4"),
        (response([(3, 0, 4)], (3, 3)), asked(min_version=4), "version 3, which the request does not accept"),
        (response([(3, 0, 2), (9, 2, 4)], (3, 9)), asked(max_version=5), "version 9, which"),
        (response([(5, 0, 2), (3, 2, 4)], (3, 5)), asked(), "version 3 after those of version 5"),
        (response([(3, 0, 2), (3, 3, 4)], (3, 3)), asked(), "do not cover"),
        (response([(3, 0, 4)], (3, 3)), asked(run_id="run-2"), "of run run-1"),
        (response([(3, 0, 4)], (3, 3), token_ids=[5, 9, 7, 8]), asked(), "after a stop token"),
        (response([(3, 0, 4)], (3, 3)), asked([[7]]).model_copy(update={"sampling_params": SamplingParams(
            max_new_tokens=4, resume=[[7]])}), "5 tokens where 4 were allowed"),
        (response([], (3, 3), token_ids=[], logprobs=[]), asked(), "broken off"),
    ],
)  # fmt: skip
def test_a_lie_is_found(answer: GenerateResponse, request_: GenerateRequest, said: str) -> None:
    assert said in str(generation_fault(answer, request_))


def completion(**changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [5, 6],
        "weight_versions": [{"version": 3, "start": 0, "end": 2}],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
    }
    own = {name: changes.pop(name) for name in list(changes) if name in choice}
    body = {
        "choices": [{**choice, **own}],
        "weight_version_start": 3,
        "weight_version_end": 3,
        "run_id": "run-1",
    }
    return {**body, **changes}


ASKED = {"return_token_ids": True, "logprobs": True}


def test_an_honest_completion_passes() -> None:
    assert completion_fault(completion(), ASKED, VersionPolicy(exact_version=3, run_id="run-1")) is None
    texts = completion(logprobs={"token_logprobs": [-0.5, -0.25]})
    assert completion_fault(texts, {"return_token_ids": True, "logprobs": 0}, VersionPolicy()) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_versions": [{"version": 2, "start": 0, "end": 2}]}, "version 2, which"),
        ({"weight_versions": [{"version": 3, "start": 0, "end": 1}]}, "do not cover"),
        ({"weight_versions": []}, "do not cover"),
        ({"weight_version_end": 4}, "claims versions 3 to 4"),
        ({"logprobs": {"content": [{"logprob": -0.5}]}}, "log-probs do not cover"),
        ({"logprobs": None}, "log-probs do not cover"),
        ({"choices": []}, "0 choices instead of 1"),
        ({"choices": [{}]}, "lacks what was asked for"),
        ({"run_id": "run-9"}, "of run run-9"),
    ],
)
def test_a_lie_in_a_completion_is_found(changes: dict[str, Any], said: str) -> None:
    policy = VersionPolicy(exact_version=3, run_id="run-1")
    assert said in str(completion_fault(completion(**changes), ASKED, policy))
