"""Sign maps: one bit a parameter, bound to the model they belong to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sprawl.anchor import signmap
from sprawl.errors import IntegrityError


@given(st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=5), st.integers(0, 2**40))
def test_round_trip(shapes: list[list[int]], step: int) -> None:
    torch.manual_seed(step % 1000)
    momentum = {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    data = signmap.encode_signs(momentum, step)
    count = sum(tensor.numel() for tensor in momentum.values())
    assert len(data) == signmap.HEADER_BYTES + (count + 7) // 8
    at, signs = signmap.decode_signs(data, {name: tuple(t.shape) for name, t in momentum.items()})
    assert at == step
    assert all(torch.equal(signs[name], tensor >= 0) for name, tensor in momentum.items())


def test_sign_of_zero_is_plus_one() -> None:
    data = signmap.encode_signs({"a": torch.tensor([0.0, -0.0, -1e-30])}, 20)
    assert signmap.decode_signs(data, {"a": (3,)})[1]["a"].tolist() == [True, True, False]


@pytest.mark.parametrize("shapes", [{"a": (4,)}, {"b": (3,)}, {"a": (3,), "b": (1,)}])
def test_sign_map_of_another_model_is_refused(shapes: dict[str, tuple[int, ...]]) -> None:
    data = signmap.encode_signs({"a": torch.ones(3)}, 20)
    with pytest.raises(IntegrityError, match="does not belong"):
        signmap.decode_signs(data, shapes)


@pytest.mark.parametrize("cut", [0, 10, signmap.HEADER_BYTES, -1])
def test_truncated_sign_map_is_refused(cut: int) -> None:
    data = signmap.encode_signs({"a": torch.ones(30)}, 20)
    with pytest.raises(IntegrityError):
        signmap.decode_signs(data[:cut], {"a": (30,)})
