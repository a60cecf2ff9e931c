"""GRPO's pure functions against slow, obvious ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sprawl.train import grpo


@given(st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=6), min_size=1, max_size=5))
def test_advantages_equal_the_obvious_ones(groups: list[list[float]]) -> None:
    rewards = torch.tensor([r for group in groups for r in group], dtype=torch.float32)
    numbers = torch.tensor([17 + i for i, group in enumerate(groups) for _ in group])
    advantages = grpo.group_advantages(rewards, numbers)
    start = 0
    for group in groups:
        part = rewards[start : start + len(group)].double()
        expected = (part - part.mean()) / (part.std() + 1e-6)
        if float(part.std()) > 1e-3:
            assert torch.allclose(advantages[start : start + len(group)].double(), expected, rtol=1e-2, atol=1e-3)
        start += len(group)


def test_mean_only_advantages_and_zero_groups() -> None:
    rewards, group = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert grpo.group_advantages(rewards, group, "group_mean").tolist() == [0.5, -0.5, 0.0, 0.0]
    assert grpo.group_advantages(rewards, group)[2:].tolist() == [0.0, 0.0]
    assert grpo.zero_advantage_groups(rewards, group) == 1


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.1, 1.5])
def test_clipped_loss_equals_the_formula(ratio: float, advantage: float) -> None:
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    result = grpo.clipped_loss(logprob, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28)
    expected = -min(ratio * advantage, max(0.8, min(1.28, ratio)) * advantage)
    assert result.loss.item() == pytest.approx(expected, rel=1e-5)
    assert result.clipped == int(-expected < ratio * advantage - 1e-6)
    result.loss.backward()
    assert logprob.grad is not None
    assert (logprob.grad.item() == 0) == bool(result.clipped)


def test_k3_is_non_negative_and_unbiased() -> None:
    torch.manual_seed(0)
    policy = torch.log_softmax(torch.randn(50), 0)
    reference = torch.log_softmax(torch.randn(50), 0)
    exact = float((policy.exp() * (policy - reference)).sum())
    taken = torch.multinomial(policy.exp(), 200_000, replacement=True)
    estimate = grpo.kl_k3(policy[taken], reference[taken])
    assert float(estimate.min()) >= 0
    assert abs(float(estimate.mean()) - exact) < 5 * float(estimate.std()) / math.sqrt(taken.numel())


def test_exact_kl_and_entropy_agree_with_torch_distributions() -> None:
    torch.manual_seed(1)
    policy, reference = torch.randn(7, 11), torch.randn(7, 11) * 5
    logprobs, other = torch.log_softmax(policy, -1), torch.log_softmax(reference, -1)
    first, second = torch.distributions.Categorical(logits=policy), torch.distributions.Categorical(logits=reference)
    assert torch.allclose(grpo.kl_exact(logprobs, other), torch.distributions.kl_divergence(first, second), rtol=1e-4)
    assert torch.allclose(grpo.entropy(logprobs), first.entropy(), rtol=1e-4)
    far = torch.log_softmax(torch.tensor([[0.0, 300.0, 5.0]]), -1)
    near = torch.log_softmax(torch.tensor([[300.0, 0.0, 5.0]]), -1)
    assert grpo.kl_exact(far, near).tolist() == [300.0]  # where k3 overflows
