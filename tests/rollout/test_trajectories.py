"""What a step trains on, as tensors and as bytes: nothing is lost, nothing damaged is read, old objects still are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from sprawl.errors import IntegrityError
from sprawl.rollout.feed import FeedState
from sprawl.rollout.trajectories import (
    REQUIRED,
    RolloutBatch,
    Span,
    Trajectory,
    batch_of,
    expert_tensor,
    from_bytes,
    to_bytes,
)
from tests.train.helpers import make_batch

TURNS = Trajectory(
    prompt=[3, 4],
    response=[5, 6, 7, 8, 9],
    logprobs=[-0.1, -0.2, 0.0, 0.0, -0.3],
    mask=[True, True, False, False, True],
    spans=[Span(4, 0, 2, "a"), Span(5, 4, 5, "b")],
    reward=0.5,
    group=11,
    seed=2**62 - 1,
    finish="stop",
    turns=2,
    experts=expert_tensor([[[0, 1]], [[2, 3]], [[7, 1]]]),
)
PLAIN = Trajectory([1], [2, 3], [-1.0, -2.0], [True, True], [Span(4, 0, 2, "a")], 1.0, 12, 7, finish="length")


def same(one: RolloutBatch, other: RolloutBatch) -> bool:
    for name, value in vars(one).items():
        twin = getattr(other, name)
        if isinstance(value, torch.Tensor):
            if value.dtype != twin.dtype or not torch.equal(value, twin):
                return False
        elif value != twin:
            return False
    return True


def test_everything_a_trainer_needs_is_read_back_exactly() -> None:
    batch = batch_of(3, [TURNS, PLAIN], ["b", "a"])
    data = to_bytes(batch)
    assert to_bytes(batch) == data
    again = from_bytes(data, "here")
    assert same(again, batch)
    assert (again.step, again.islands, again.samples, again.response_tokens) == (3, ("b", "a"), 2, 5)
    assert again.spans_of(0) == list(TURNS.spans)
    assert again.spans_of(1) == list(PLAIN.spans)
    assert again.sampled.tolist() == [[True, True, False, False, True], [True, True, False, False, False]]
    assert again.flat_logprobs(torch.tensor([0, 1])).tolist() == pytest.approx([-0.1, -0.2, -0.3, -1.0, -2.0])
    assert again.finish is not None
    assert again.finish.tolist() == [1, 2]
    assert again.turns is not None
    assert again.turns.tolist() == [2, 1]
    assert again.expert_lengths is not None
    assert again.experts is not None
    assert (again.expert_lengths.tolist(), again.experts.shape, again.experts.dtype) == ([3, 0], (3, 1, 2), torch.uint8)
    assert (again.version_start.tolist(), again.version_end.tolist()) == ([4, 4], [5, 4])


@st.composite
def trajectories(draw: Any) -> Trajectory:
    mask = draw(st.lists(st.booleans(), min_size=1, max_size=9).filter(any))
    spans: list[Span] = []
    for position, sampled in enumerate(mask):
        if sampled:
            version, island = draw(st.integers(0, 3)), draw(st.sampled_from(["east", "west"]))
            spans.append(Span(version, position, position + 1, island))
    return Trajectory(
        prompt=draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)),
        response=draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask))),
        logprobs=[draw(st.floats(-100, 0, width=32)) if sampled else 0.0 for sampled in mask],
        mask=mask,
        spans=spans,
        reward=draw(st.floats(0, 1, width=32)),
        group=draw(st.integers(0, 2**31 - 1)),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@given(st.lists(trajectories(), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_any_batch_round_trips(rows: list[Trajectory]) -> None:
    batch = batch_of(1, rows, ["east"])
    again = from_bytes(to_bytes(batch), "here")
    assert same(again, batch)
    for number, row in enumerate(rows):
        start, end = len(row.prompt), len(row.prompt) + len(row.response)
        assert again.tokens[number, :end].tolist() == [*row.prompt, *row.response]
        assert again.logprobs[number, : end - start].tolist() == list(row.logprobs)
        assert again.sampled[number, : end - start].tolist() == list(row.mask)
        assert again.spans_of(number) == list(row.spans)


def test_the_oldest_token_of_a_group_counts_wherever_it_is() -> None:
    """A sample that went on elsewhere may have gone back; objects without spans say what they know."""
    back = replace(PLAIN, spans=[Span(6, 0, 1, "a"), Span(3, 1, 2, "b")], group=11)
    batch = batch_of(8, [TURNS, back, PLAIN], ["b", "a"])
    assert batch.oldest_versions.tolist() == [3, 4]
    assert replace(batch, spans=None).oldest_versions.tolist() == [4, 4]


def test_where_a_stream_stood_is_read_back_and_damage_of_it_is_found() -> None:
    feed = FeedState((11, 12), 15, (3, 14), discarded=2, queue_seconds=0.5)
    data = to_bytes(replace(batch_of(3, [TURNS, PLAIN], ["b", "a"]), feed=feed))
    assert from_bytes(data, "here").feed == feed
    assert from_bytes(data.replace(b"discarded", b"discorded"), "here").feed == replace(feed, discarded=0)
    with pytest.raises(IntegrityError, match="here: damaged rollouts"):
        from_bytes(data.replace(b"under_way", b"under_may"), "here")


def old_object(batch: RolloutBatch, fmt: str = "sprawl-rollouts-1") -> bytes:
    described = json.dumps({"format": fmt, "step": batch.step, "islands": batch.islands})
    return save({name: getattr(batch, name).contiguous() for name in REQUIRED}, {"rollouts": described})


def test_objects_of_the_format_before_are_read_and_those_of_a_later_one_refused() -> None:
    batch = make_batch()
    assert same(from_bytes(old_object(batch), "here"), batch)
    assert batch.spans_of(0) is None
    with pytest.raises(IntegrityError, match="sprawl-rollouts-9"):
        from_bytes(old_object(batch, "sprawl-rollouts-9"), "here")


def test_damage_is_found() -> None:
    data = to_bytes(batch_of(3, [TURNS, PLAIN], ["b", "a"]))
    for damaged in (data[:-1], data[:20], b"", old_object(make_batch(), "sprawl-rollouts-2")):
        with pytest.raises(IntegrityError, match="here"):
            from_bytes(damaged, "here")


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": [-0.1]},
        {"spans": [Span(4, 0, 5, "a")]},  # claims what a tool wrote
        {"spans": [Span(4, 0, 2, "a")]},  # leaves a sampled token out
        {"mask": [False] * 5, "spans": []},
    ],
)
def test_a_row_whose_parts_do_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="trajectory 0"):
        batch_of(1, [Trajectory(**{**vars(TURNS), **changes})], ["a"])
