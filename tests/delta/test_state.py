import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sprawl.delta.state import root_digest, served_view, tensor_digest, tensor_digests


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_rounds_to_nearest_even(patterns: list[int]) -> None:
    bits = np.array(patterns, np.uint32)
    view = served_view({"w": torch.from_numpy(bits.view(np.float32).copy())}, "bfloat16")["w"]
    got = view.view(torch.int16).numpy().view(np.uint16)
    wide = bits.astype(np.uint64)
    expected = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    finite = (bits & 0x7F800000) != 0x7F800000
    assert (got[finite] == expected[finite]).all()


def test_never_shares_memory_and_keeps_non_floats() -> None:
    masters = {"half": torch.ones(3, dtype=torch.bfloat16), "ids": torch.arange(3)}
    view = served_view(masters, "bfloat16")
    masters["half"].zero_()
    masters["ids"].zero_()
    assert view["half"].tolist() == [1, 1, 1]
    assert view["ids"].tolist() == [0, 1, 2]
    assert view["ids"].dtype == torch.int64


def test_digest_sees_bits_shape_and_dtype() -> None:
    zero = torch.zeros(4)
    variants = [zero, -zero, zero.reshape(2, 2), zero.to(torch.int32), torch.zeros(()), torch.zeros(0)]
    assert len({tensor_digest(tensor) for tensor in variants}) == len(variants)


def test_root_does_not_depend_on_order_but_on_names() -> None:
    digests = tensor_digests({"a": torch.ones(2), "b": torch.zeros(2)})
    assert root_digest(digests) == root_digest(dict(reversed(digests.items())))
    assert root_digest(digests) != root_digest({"a": digests["b"], "b": digests["a"]})
