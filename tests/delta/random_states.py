"""Chains of random states for property tests: every dtype, shape and bit pattern, and changes of form."""

import numpy as np
import torch

from sprawl.delta.bits import integer_view
from sprawl.delta.state import State

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.bool, torch.int64]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 5), (40, 11)]


def bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern: NaN payloads, infinities, -0.0. Booleans are 0 or 1."""
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    data = rng.integers(0, 2 if dtype == torch.bool else 256, count, np.uint8)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data.tobytes()), dtype=dtype).reshape(shape).clone()


def successor(rng: np.random.Generator, state: State) -> State:
    """Some elements change, now and then a tensor changes its form, goes or comes."""
    new: State = {}
    for name, tensor in state.items():
        fate = rng.integers(0, 12)
        if fate == 0:
            continue
        if fate == 1:
            new[name] = bits(rng, SHAPES[rng.integers(len(SHAPES))], DTYPES[rng.integers(len(DTYPES))])
            continue
        new[name] = tensor.clone()
        where = rng.random(tensor.numel()) < (0.0, 0.1, 0.9)[rng.integers(3)]
        if where.any():
            integer_view(new[name])[where] = integer_view(bits(rng, tuple(tensor.shape), tensor.dtype))[where]
    if rng.integers(0, 4) == 0:
        new[f"t{rng.integers(8)}"] = bits(rng, (5,), torch.bfloat16)
    return new


def first(rng: np.random.Generator) -> State:
    """A tensor of every dtype."""
    return {f"t{i}": bits(rng, SHAPES[rng.integers(len(SHAPES))], dtype) for i, dtype in enumerate(DTYPES)}
