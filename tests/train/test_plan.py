"""Microbatches out of a token budget."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sprawl.errors import SprawlError
from sprawl.train.plan import check_shares, cut, fill, plan_updates
from sprawl.train.trainer import Trainer
from tests.train.helpers import HF_CONFIG, make_batch, make_config, make_decoder


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), budget=st.integers(40, 200))
def test_runs_cover_every_row_once_within_the_budget_and_are_few(lengths: list[int], budget: int) -> None:
    runs = fill(lengths, budget)
    assert sorted(place for run in runs for place in run) == list(range(len(lengths)))
    sizes = [sum(lengths[place] for place in run) for run in runs]
    assert max(sizes) <= budget
    # Two neighbours that would fit together would have been one run.
    assert len(runs) <= 1 or all(one + other > budget / 2 for one, other in pairwise(sizes))
    # Like goes with like: what a run pads its rows to is the length of its longest, and runs do not overlap in length.
    spans = [(min(lengths[place] for place in run), max(lengths[place] for place in run)) for run in runs]
    assert all(earlier[0] >= later[1] for earlier, later in pairwise(spans))


def test_padding_of_a_fixed_payload_is_small() -> None:
    """256 samples of 100 to 400 tokens in microbatches of at most 4,096: under 5 % of the payload is padding, where
    microbatches of equally many rows have over 20 %."""
    lengths = torch.randint(100, 401, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    runs = fill(lengths, 4096)
    sizes = [sum(lengths[place] for place in run) for run in runs]
    assert 1 - sum(sizes) / (len(sizes) * max(sizes)) < 0.05
    ordered = sorted(lengths, reverse=True)
    rows = [sum(ordered[first : first + 16]) for first in range(0, 256, 16)]
    assert 1 - sum(rows) / (len(rows) * max(rows)) > 0.2


def test_an_overlong_sample_is_named_with_its_problem() -> None:
    batch = make_batch(groups=4)
    config = make_config(grpo={"microbatch_tokens": 5})
    longest = int((batch.prompt_lengths + batch.response_lengths).argmax())
    named = f"step 1: sample {longest} .problem {int(batch.groups[longest])}. has .* grpo.microbatch_tokens is 5"
    with pytest.raises(SprawlError, match=named):
        plan_updates(batch, config.grpo)


def test_a_sample_longer_than_the_model_is_named_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HF_CONFIG, "max_position_embeddings", 4)
    trainer = Trainer(make_decoder(), make_decoder(), make_config())
    with pytest.raises(SprawlError, match=r"sample .* max_position_embeddings is 4"):
        trainer.step(1, make_batch(), None)
    assert not trainer.optimizer.state  # type: ignore[union-attr]


def test_rows_and_budget_are_cut_alike_where_they_agree() -> None:
    batch = make_batch(groups=4)
    everything = torch.arange(batch.samples)
    one = cut(batch, everything, make_config(grpo={"microbatch_tokens": 1000}).grpo)
    assert [sorted(micro.rows.tolist()) for micro in one] == [everything.tolist()]
    by_rows = cut(batch, everything, make_config(grpo={"microbatch_rows": 5}).grpo)
    assert [len(micro.rows) for micro in by_rows] == [5, 5, 5, 1]


def test_a_budget_gives_the_gradient_of_rows() -> None:
    """Up to the order of sums: which samples go together does not matter to the loss, nor to any mask."""
    norms = []
    for grpo in ({"microbatch_rows": 100}, {"microbatch_tokens": 20}):
        trainer = Trainer(make_decoder(), make_decoder(), make_config(grpo=grpo))
        norms.append(trainer.step(1, make_batch(), None).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_replicas_without_a_microbatch_are_refused() -> None:
    check_shares(2, 2)
    with pytest.raises(SprawlError, match=r"policy.replicas=3 but an update has 2 microbatches"):
        check_shares(2, 3)
