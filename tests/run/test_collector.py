"""From responses to a batch; which versions a step asks for; seeds."""

from __future__ import annotations

import torch

from sprawl.problems import Problem
from sprawl.rollout.trajectories import Span
from sprawl.rollout.wire import GenerateRequest, GenerateResponse, Sample, SamplingParams, VersionSpan
from sprawl.run.collector import make_batch, sample_seed, version_policy
from tests.train.helpers import make_config


def sample(ids: list[int], *versions: int) -> Sample:
    spans = [VersionSpan(version=version, start=i, end=i + 1) for i, version in enumerate(versions)]
    return Sample(token_ids=ids, logprobs=[-0.5 * i for i in range(len(ids))], finish_reason="stop", spans=spans)


def test_batch_lays_out_prompt_and_response_per_sample() -> None:
    problems = [Problem(7, "a", "b", {}), Problem(8, "c", "d", {})]
    requests = [
        GenerateRequest(input_ids=[1, 2], sampling_params=SamplingParams(n=2, seeds=[10, 11])),
        GenerateRequest(input_ids=[3], sampling_params=SamplingParams(n=2, seeds=[12, 13])),
    ]
    samples = [[sample([5], 4), sample([6, 7, 8], 4, 5, 5)], [sample([9, 1], 5, 5), sample([2], 5)]]
    responses = [
        GenerateResponse(samples=group, weight_version_start=4, weight_version_end=5, island_id=f"island-{i}")
        for i, group in enumerate(samples)
    ]
    batch = make_batch(6, problems, requests, responses, [[1.0, 0.0], [0.0, 1.0]])
    assert batch.tokens.tolist() == [[1, 2, 5, 0, 0], [1, 2, 6, 7, 8], [3, 9, 1, 0, 0], [3, 2, 0, 0, 0]]
    assert batch.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert batch.response_lengths.tolist() == [1, 3, 2, 1]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert batch.groups.tolist() == [7, 7, 8, 8]
    assert batch.seeds.tolist() == [10, 11, 12, 13]
    assert batch.version_start.tolist() == [4, 4, 5, 5]
    assert batch.version_end.tolist() == [4, 5, 5, 5]
    assert batch.islands == ("island-0", "island-1")
    assert batch.loss_mask is None
    assert batch.spans_of(1) == [Span(4, 0, 1, "island-0"), Span(5, 1, 2, "island-0"), Span(5, 2, 3, "island-0")]
    assert batch.flat_logprobs(torch.tensor([1, 3])).tolist() == [0.0, -0.5, -1.0, 0.0]


def test_versions_a_step_accepts() -> None:
    pinned = {"deterministic": True, "anchor": {"enabled": False}, "rollout": {"follow": "demand", "max_staleness": 1}}
    assert [version_policy(make_config(**pinned), step).exact_version for step in (1, 2, 3)] == [0, 0, 1]
    loose = version_policy(make_config(rollout={"max_staleness": 2}), 6)
    assert (loose.min_version, loose.max_version, loose.exact_version) == (3, None, None)


def test_seeds_are_distinct_and_fit_an_int64() -> None:
    seeds = {sample_seed(7, problem, s, step) for problem in range(50) for s in range(16) for step in (1, 2)}
    assert len(seeds) == 50 * 16 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(7, 3, 5, 9) == sample_seed(7, 3, 5, 9)
