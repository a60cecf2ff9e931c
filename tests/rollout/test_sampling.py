"""Counter-based sampling: reproducible, right distribution, right log-probs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sprawl.rollout.rows import spans_of
from sprawl.rollout.sampling import BROKEN, derive_seeds, sample, uniforms


@given(seed=st.integers(-(2**70), 2**70), position=st.integers(0, 10_000), others=st.lists(st.integers(0, 99)))
def test_a_number_depends_on_seed_and_position_alone(seed: int, position: int, others: list[int]) -> None:
    alone = uniforms([seed], position)[0]
    assert 0 <= alone < 1
    assert uniforms([*others, seed], position)[-1] == alone
    assert uniforms([seed], position + 1)[0] != alone
    assert uniforms([seed + 1], position)[0] != alone


def test_numbers_are_uniform_over_seeds_and_positions() -> None:
    for numbers in (uniforms(range(20_000), 3), np.array([uniforms([7], p)[0] for p in range(5_000)])):
        counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
        expected = len(numbers) / 10
        assert ((counts - expected) ** 2 / expected).sum() < 30  # chi square, 9 degrees of freedom


def test_sampling_follows_the_softmax_at_its_temperature() -> None:
    row = torch.tensor([2.0, 0.0, -1.0, -50.0, 1.0])
    draws = 40_000
    tokens, logprobs = sample(row.expand(draws, -1), 0.7, uniforms(range(draws), 0))
    wanted = torch.softmax(row.double() / 0.7, -1)
    seen = torch.bincount(torch.tensor(tokens), minlength=5) / draws
    assert (seen - wanted).abs().max() < 0.01
    assert logprobs[0] == pytest.approx(float(wanted[tokens[0]].log()), abs=1e-6)


@given(st.floats(0, 1, exclude_max=True))
def test_a_token_without_probability_is_never_sampled(number: float) -> None:
    logits = torch.full((1, 6), -1e30)
    logits[0, 2] = logits[0, 4] = 3.0
    tokens, _ = sample(logits, 1.0, np.array([number]))
    assert tokens[0] == (2 if number < 0.5 else 4)
    assert sample(logits, 1.0, np.array([1 - 2**-53]))[0] == [4]


def test_temperature_zero_is_greedy_with_logprobs_at_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    tokens, logprobs = sample(logits, 0.0, np.array([0.99]))
    assert tokens == [1]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(logits, -1)[0, 1]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_give_no_token_and_spoil_no_other_row(bad: float) -> None:
    good = torch.tensor([0.3, -1.0])
    tokens, logprobs = sample(torch.stack([good, torch.tensor([0.0, bad]), good]), 1.0, np.array([0.5, 0.5, 0.5]))
    alone = sample(good.unsqueeze(0), 1.0, np.array([0.5]))
    assert tokens[1] == BROKEN
    assert np.isnan(logprobs[1])
    assert (tokens[::2], logprobs[::2]) == (alone[0] * 2, alone[1] * 2)


def test_derived_seeds_start_with_the_seed_and_do_not_overlap() -> None:
    assert derive_seeds(5, 1) == [5]
    seeds = [seed for start in range(50) for seed in derive_seeds(start, 8)]
    assert len(set(seeds)) == len(seeds)


@given(st.lists(st.integers(0, 3), max_size=40))
def test_spans_cover_every_token_once(versions: list[int]) -> None:
    spans = spans_of(versions)
    assert [span.version for span in spans for _ in range(span.start, span.end)] == versions
    assert all(a.version != b.version and a.end == b.start for a, b in pairwise(spans))
