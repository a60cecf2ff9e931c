"""vLLM's answers as samples. The answers have the form that a real server sent; `tests/vllm` runs one."""

from __future__ import annotations

from typing import Any

import pytest

from sprawl.rollout.engine import EngineError
from sprawl.rollout.vllm.api import Chunks, Wanted
from sprawl.rollout.wire import VersionSpan


def choice(tokens: list[int], reason: str | None = None, spans: list[Any] | None = None, **changes: Any) -> Any:
    content = [{"token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": []} for token in tokens]
    versions = None if spans is None else [{"version": v, "start": s, "end": e} for v, s, e in spans]
    answer = {"index": 0, "finish_reason": reason, "token_ids": tokens, "weight_versions": versions}
    return answer | {"logprobs": {"content": content}} | changes


def test_a_stream_is_put_together() -> None:
    chunks = Chunks()
    assert chunks.add(choice([5])) == [(5, -0.5)]
    chunks.add(choice([6, 7]))
    chunks.add(choice([8], "length", [("3", 0, 2), ("4", 2, 4)]))
    sample = chunks.sample()
    assert sample.token_ids == [5, 6, 7, 8]
    assert sample.finish_reason == "length"
    assert sample.spans == [VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=4)]


@pytest.mark.parametrize(("cut", "spans"), [(1, [(3, 0, 1)]), (2, [(3, 0, 2)]), (3, [(3, 0, 2), (4, 2, 3)])])
def test_a_row_that_was_cut_keeps_the_versions_of_what_it_keeps(cut: int, spans: list[tuple[int, int, int]]) -> None:
    chunks = Chunks()
    chunks.add(choice([5, 6, 7, 8]))
    chunks.add(choice([], "abort", [("3", 0, 2), ("4", 2, 4)]))
    sample = chunks.sample(cut)
    assert sample.token_ids == [5, 6, 7, 8][:cut]
    assert len(sample.logprobs) == cut
    assert sample.finish_reason == "stop"
    assert [(s.version, s.start, s.end) for s in sample.spans] == spans


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (choice([5], "abort", [("3", 0, 1)]), "broke the request off"),
        (choice([5], None, [("3", 0, 1)]), "broke the request off"),
        (choice([5, 6], "length"), "did not say which version"),
        (choice([5, 6], "length", [("3", 0, 1)]), "did not say which version"),
        (choice([5, 6], "length", [("3", 0, 1), ("4", 0, 2)]), "did not say which version"),
        (choice([5], "length", [("default", 0, 1)]), "'default'"),
        (choice([5], "length", [("3", 0, 1)], logprobs=None), "without their log-probs"),
        (choice([5], "length", [("3", 0, 1)], logprobs={"content": [{"token_id": 6, "logprob": 0}]}), "without"),
    ],
)
def test_what_cannot_be_vouched_for_is_no_sample(answer: Any, message: str) -> None:
    def read() -> None:
        chunks = Chunks()
        chunks.add(answer)
        chunks.sample()

    with pytest.raises(EngineError, match=message):
        read()


@pytest.mark.parametrize("logprob", [-9999.0, float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_noticed(logprob: float) -> None:
    with pytest.raises(EngineError, match="non-finite"):
        Chunks().add(choice([5], logprobs={"content": [{"token_id": 5, "logprob": logprob}]}))


def test_any_integer_is_a_seed_and_only_the_run_says_what_stops() -> None:
    for seed in (-1, 0, 2**40, 2**200 + 1):
        sampling = Wanted([1], 4, 1.0, seed, [7], "v1").body("r", stream=False)["sampling_params"]
        assert 0 <= sampling["seed"] < 2**63
        assert sampling["ignore_eos"]
        assert sampling["stop_token_ids"] == [7]
