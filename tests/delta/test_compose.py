"""Composing decoded deltas, and taking them back, over dtypes, shapes, bit patterns and changes of form."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sprawl.delta.codec import Overwrites, apply, decode, encode
from sprawl.delta.compose import combine, compose, inverse, overwrites_bytes, restrict
from sprawl.delta.journal import pack_overwrites, unpack_overwrites
from sprawl.delta.segment import Patch
from sprawl.delta.state import State, clone_state, root_digest, tensor_digests
from sprawl.errors import IntegrityError
from tests.delta.random_states import first, successor


def root(state: State) -> str:
    return root_digest(tensor_digests(state))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_composition_and_inverse_are_bit_exact(seed: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    states = [first(rng)]
    for _ in range(steps):
        states.append(successor(rng, states[-1]))
    decoded = [decode(old, encode(old, new).blob) for old, new in pairwise(states)]

    merged = compose(decoded)
    jumped = clone_state(states[0])
    apply(jumped, merged)
    assert root(jumped) == root(states[-1])
    apply(jumped, merged)
    assert root(jumped) == root(states[-1]), "applying twice is applying once"

    rolling, back = clone_state(states[0]), Overwrites()
    for step in decoded:
        back = compose([inverse(rolling, step), back])
        apply(rolling, step)
    assert root(rolling) == root(states[-1])
    apply(rolling, back)
    assert root(rolling) == root(states[0])

    again, note = unpack_overwrites(b"".join(pack_overwrites(merged, {"n": 1})), "j")
    assert note == {"n": 1}
    replayed = clone_state(states[0])
    apply(replayed, again)
    assert root(replayed) == root(states[-1])


def patch(*pairs: tuple[int, int]) -> Patch:
    return Patch(np.array([i for i, _ in pairs], np.uint32), np.array([v for _, v in pairs], np.uint16))


def test_the_last_value_of_a_position_stands() -> None:
    merged = compose([Overwrites({"a": patch((1, 10), (5, 50))}), Overwrites({"a": patch((0, 7), (5, 51))})])
    assert merged.patches["a"].indices.tolist() == [0, 1, 5]
    assert merged.patches["a"].values.tolist() == [7, 10, 51]
    assert overwrites_bytes(merged) == 3 * (4 + 2)
    assert compose([]).changed == []


def test_the_inputs_are_not_changed() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    compose([Overwrites(whole={"a": tensor}), Overwrites({"a": patch((1, 10))})])
    assert not tensor.any()


def test_steps_that_cannot_follow_each_other_are_refused() -> None:
    with pytest.raises(IntegrityError, match="do not meet"):
        compose([Overwrites(new_root="x"), Overwrites(base_root="y")])
    with pytest.raises(IntegrityError, match="'a'"):
        compose([Overwrites(removed=["a"]), Overwrites({"a": patch((1, 1))})])


def test_two_writers_of_one_tensor_are_refused() -> None:
    one, two = Overwrites({"a": patch((1, 1))}), Overwrites(whole={"a": torch.zeros(2)})
    with pytest.raises(IntegrityError, match=r"v7.*'a'"):
        combine([one, two], "v7")
    with pytest.raises(IntegrityError, match="removed by another"):
        combine([one, Overwrites(removed=["a"])], "v7")
    assert combine([one, Overwrites(removed=["b"])], "v7").removed == ["b"]


def test_restrict() -> None:
    both = Overwrites({"a": patch((1, 1)), "b": patch((1, 1))}, {"c": torch.zeros(1)}, ["d"])
    assert restrict(both, {"b", "d"}).changed == ["b"]
    assert restrict(both, {"b", "d"}).removed == ["d"]


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "magic"])
def test_a_torn_journal_is_refused_whole(damage: str) -> None:
    blob = b"".join(pack_overwrites(Overwrites({"a": patch((1, 10))}, {"w": torch.ones(3)}, ["x"]), {}))
    match damage:
        case "flip":
            blob = blob[:-3] + bytes([blob[-3] ^ 1]) + blob[-2:]
        case "truncate":
            blob = blob[:-1]
        case "empty":
            blob = b""
        case "magic":
            blob = b"X" + blob[1:]
    with pytest.raises(IntegrityError, match="the journal"):
        unpack_overwrites(blob, "the journal")
