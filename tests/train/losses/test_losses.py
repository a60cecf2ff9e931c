"""Every loss against the slow implementation, over random ragged batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sprawl.config import GrpoConfig, OffPolicyConfig
from sprawl.train import grpo
from sprawl.train.losses import surrogate
from sprawl.train.losses.aggregate import sample_weights
from sprawl.train.losses.objective import make_targets, microbatch_loss
from sprawl.train.losses.offpolicy import correction
from sprawl.train.losses.selection import overlong_penalty, plan_refill
from tests.train.helpers import make_batch, make_config
from tests.train.losses import slow


@dataclass
class Case:
    """A ragged batch: [m] tokens of all samples, [b] counts and advantages, and the same as nested lists."""

    counts: torch.Tensor
    logprobs: torch.Tensor
    old: torch.Tensor
    sampler: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    include: torch.Tensor

    def rows(self, values: torch.Tensor) -> slow.Rows:
        return [part.tolist() for part in values.double().split(self.counts.tolist())]


@st.composite
def cases(draw: Any) -> Case:
    counts = torch.tensor(draw(st.lists(st.integers(0, 6), min_size=1, max_size=6)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.05, 0.5, 1.5]))
    tokens = int(counts.sum())
    old = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 3

    def near() -> torch.Tensor:
        return old + spread * torch.randn(tokens, generator=generator, dtype=torch.float64)

    return Case(
        counts=counts,
        logprobs=near(),
        old=old,
        sampler=near(),
        reference=near(),
        advantages=torch.randn(counts.shape[0], generator=generator, dtype=torch.float64),
        include=torch.rand(counts.shape[0], generator=generator) < 0.7,
    )


LOSSES, AGGREGATIONS = ("ppo", "gspo", "cispo"), ("token_mean", "sequence_mean", "dr_grpo")
KLS, OFF_POLICY = ("k1", "k2", "k3"), ("none", "tis", "icepop", "sequence_mask")


@settings(deadline=None, max_examples=100)
@given(
    case=cases(),
    loss=st.sampled_from(LOSSES),
    aggregation=st.sampled_from(AGGREGATIONS),
    kl=st.sampled_from(KLS),
    kl_coef=st.sampled_from([0.0, 0.1]),
    off_policy=st.sampled_from(OFF_POLICY),
    clips=st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.05, 0.5), (1.0, 4.0)]),
    microbatch=st.integers(1, 6),
)
def test_the_whole_loss_equals_the_slow_one(
    case: Case,
    loss: str,
    aggregation: str,
    kl: str,
    kl_coef: float,
    off_policy: str,
    clips: tuple[float, float],
    microbatch: int,
) -> None:
    """All of it at once, summed over microbatches of any size."""
    config = GrpoConfig.model_validate(
        {
            "loss": loss,
            "kl": kl,
            "kl_coef": kl_coef,
            "clip_low": clips[0],
            "clip_high": clips[1],
            "off_policy": {"kind": off_policy},
        }
    )
    weights = sample_weights(case.counts, case.include, aggregation, 7).double()  # type: ignore[arg-type]
    pieces = [values.split(case.counts.tolist()) for values in (case.logprobs, case.old, case.sampler, case.reference)]
    total = 0.0
    for rows in torch.arange(case.counts.shape[0]).split(microbatch):
        logprobs, old, sampler, reference = (torch.cat([piece[int(row)] for row in rows]) for piece in pieces)
        part = microbatch_loss(
            logprobs, old, sampler, reference, case.advantages[rows], weights[rows], case.counts[rows], config
        )
        total += float(part.loss)
    losses = slow.token_losses(loss, case.rows(case.logprobs), case.rows(case.old), case.advantages.tolist(), *clips)
    bound = slow.off_policy_weights(case.rows(case.old), case.rows(case.sampler), config.off_policy)
    for sample, row in enumerate(losses):
        for token in range(len(row)):
            row[token] *= bound[sample][token]
            row[token] += kl_coef * slow.kl(
                kl, case.rows(case.logprobs)[sample][token], case.rows(case.reference)[sample][token]
            )
    expected = slow.aggregate(losses, case.include.tolist(), aggregation, 7)
    assert total == pytest.approx(expected, rel=1e-5, abs=1e-7)


@settings(deadline=None)
@given(case=cases(), loss=st.sampled_from(LOSSES))
def test_gradients_are_those_of_the_slow_loss(case: Case, loss: str) -> None:
    """Central differences of the slow implementation; CISPO's by hand, because its ratio is held fixed."""
    config = GrpoConfig.model_validate({"loss": loss, "clip_high": 0.3})
    weights = torch.ones(case.counts.shape[0], dtype=torch.float64)
    logprobs = case.logprobs.clone().requires_grad_()
    microbatch_loss(logprobs, case.old, None, None, case.advantages, weights, case.counts, config).loss.backward()
    assert logprobs.grad is not None

    def value(at: torch.Tensor) -> float:
        rows = slow.token_losses(loss, case.rows(at), case.rows(case.old), case.advantages.tolist(), 0.2, 0.3)
        return sum(sum(row) for row in rows)

    for token in range(min(4, logprobs.shape[0])):
        if loss == "cispo":
            ratio = slow.clip(math.exp(float(case.logprobs[token] - case.old[token])), 0.8, 1.3)
            sample = int(surrogate.sample_index(case.counts)[token])
            expected = -ratio * float(case.advantages[sample])
        else:
            step = torch.zeros_like(case.logprobs)
            step[token] = 1e-6
            expected = (value(case.logprobs + step) - value(case.logprobs - step)) / 2e-6
        assert float(logprobs.grad[token]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@given(case=cases(), kind=st.sampled_from(OFF_POLICY))
def test_corrections_and_what_they_cut(case: Case, kind: str) -> None:
    config = OffPolicyConfig.model_validate({"kind": kind})
    result = correction(case.old, case.sampler, case.counts, config)
    expected = [w for row in slow.off_policy_weights(case.rows(case.old), case.rows(case.sampler), config) for w in row]
    assert result.weight.tolist() == pytest.approx(expected, rel=1e-9)
    assert not result.weight.requires_grad
    raw = (case.old - case.sampler).exp()
    if kind in ("tis", "icepop"):
        assert result.cut.tolist() == [not math.isclose(w, r) for w, r in zip(expected, raw.tolist(), strict=True)]
    elif kind == "sequence_mask":
        assert result.cut.tolist() == [w == 0 for w in expected]
    else:
        assert not result.cut.any()


@given(
    groups=st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=2, max_size=6), min_size=1, max_size=5),
    kind=st.sampled_from(["group_std", "group_mean"]),
)
def test_advantages_and_uniform_groups(groups: list[list[float]], kind: str) -> None:
    rewards = torch.tensor([reward for group in groups for reward in group])
    numbers = torch.tensor([40 + i for i, group in enumerate(groups) for _ in group])
    got = grpo.group_advantages(rewards, numbers, kind)  # type: ignore[arg-type]
    assert got.tolist() == pytest.approx(slow.advantages(groups, kind), rel=1e-4, abs=1e-5)
    uniform = [len(set(group)) == 1 for group in groups for _ in group]
    assert grpo.uniform_groups(rewards, numbers).tolist() == uniform
    assert got[torch.tensor(uniform)].tolist() == [0.0] * sum(
        uniform
    )  # exactly: a rounding error of the mean is not a signal
    assert grpo.zero_advantage_groups(rewards, numbers) == sum(len(set(group)) == 1 for group in groups)


@given(length=st.integers(0, 40), limit=st.integers(1, 30), buffer=st.integers(1, 30))
def test_overlong_penalty_is_daposs(length: int, limit: int, buffer: int) -> None:
    if length <= limit - buffer:
        expected = 0.0
    elif length <= limit:
        expected = ((limit - buffer) - length) / buffer
    else:
        expected = -1.0
    assert overlong_penalty(torch.tensor([length]), limit, buffer).tolist() == pytest.approx([expected])


@given(
    rounds=st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=4, max_size=4),
    wanted=st.integers(1, 8),
    allowed=st.integers(0, 3),
)
def test_dynamic_sampling_is_bounded_and_always_fills_the_batch(
    rounds: list[list[bool]], wanted: int, allowed: int
) -> None:
    sampled: list[bool] = []
    missing, asked = wanted, 0
    for left in range(allowed, -1, -1):
        sampled += rounds[asked][:missing]
        asked += 1
        plan = plan_refill(sampled, wanted, left)
        if not plan.missing:
            break
        assert plan.missing == wanted - sum(sampled)
        missing = plan.missing
    assert asked <= 1 + allowed
    assert plan.missing == 0
    assert len(plan.keep) == wanted
    assert plan.keep == sorted(set(plan.keep))
    assert plan.dropped == len(sampled) - wanted
    assert sum(sampled[place] for place in plan.keep) == min(wanted, sum(sampled))  # useful ones first


def test_zero_groups_and_truncated_samples_leave_numerator_and_denominator() -> None:
    batch = make_batch()  # group 0 scored nothing, groups 1 and 2 half
    everything = make_targets(batch, make_config())
    assert everything.include.all()
    dropped = make_targets(batch, make_config(grpo={"zero_groups": "drop"}))
    assert dropped.include.tolist() == [False] * 4 + [True] * 8
    rows = torch.arange(12)
    kept = batch.response_lengths[4:].sum()
    assert dropped.weights(rows, make_config()).tolist() == pytest.approx([0.0] * 4 + [1 / float(kept)] * 8)
    object.__setattr__(batch, "finish", (2 * (torch.arange(12) == 5)).to(torch.uint8))
    filtered = make_targets(batch, make_config(grpo={"overlong": {"kind": "filter"}}))
    assert filtered.include.tolist() == [row != 5 for row in range(12)]
    config = make_config(grpo={"overlong": {"kind": "penalty", "buffer": 4}}, rollout={"max_new_tokens": 4})
    shaped = batch.rewards + overlong_penalty(batch.response_lengths, 4, 4)
    expected = grpo.group_advantages(shaped, batch.groups.long())
    assert torch.equal(make_targets(batch, config).advantages, expected)


def test_weights_of_an_update_are_zero_outside_it() -> None:
    targets, config = make_targets(make_batch(), make_config()), make_config()
    weights = targets.weights(torch.arange(4, 8), config)
    assert bool((weights[4:8] > 0).all())
    assert float(weights.sum() - weights[4:8].sum()) == 0.0
    assert float((weights * targets.counts).sum()) == pytest.approx(1.0)


def test_kl_estimators_average_to_the_kl() -> None:
    """k1 and k3 are unbiased; k2 is close for policies that are."""
    torch.manual_seed(0)
    policy = torch.log_softmax(torch.randn(50), 0)
    reference = torch.log_softmax(policy + 0.1 * torch.randn(50), 0)
    exact = float(grpo.kl_exact(policy[None], reference[None]))
    taken = torch.multinomial(policy.exp(), 400_000, replacement=True)
    for estimator, slack in ((grpo.kl_k1, 0.0), (grpo.kl_k3, 0.0), (grpo.kl_k2, 0.1 * exact)):
        values = estimator(policy[taken], reference[taken])
        error = 5 * float(values.std()) / math.sqrt(taken.numel())
        assert abs(float(values.mean()) - exact) < error + slack
