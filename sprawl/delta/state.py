"""Served views: the weights exactly as a rollout engine holds them, and the digests that name a state.

Digests cover dtype, shape and raw bytes, so that -0.0 and +0.0, or two NaN payloads, are different states.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import torch
from blake3 import blake3

State = dict[str, torch.Tensor]
"""HF tensor names -> CPU contiguous tensors of a served view. Tied weights appear once."""


def served_view(masters: Mapping[str, torch.Tensor], dtype: str) -> State:
    """Round master weights to what engines serve: `views.make_view` of the format named `dtype`.

    `bfloat16` and `float16` round every floating tensor to nearest even and keep others. The result never shares
    memory with `masters`, which may live on any device.
    """
    from sprawl.delta.views import make_view  # views know states, not the other way round

    return make_view(masters, dtype)


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes in row-major order: uint8 [nbytes], sharing memory when the tensor is contiguous."""
    if tensor.numel() == 0:  # may have strides that `view` refuses
        return np.empty(0, np.uint8)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def tensor_digest(tensor: torch.Tensor) -> str:
    """blake3 (hex) over dtype, shape and raw bytes."""
    header = json.dumps([dtype_name(tensor.dtype), list(tensor.shape)], separators=(",", ":"))
    hasher = blake3(header.encode() + b"\n")
    hasher.update(raw_bytes(tensor).data)
    return hasher.hexdigest()


def tensor_digests(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """`tensor_digest` of every tensor."""
    return {name: tensor_digest(tensor) for name, tensor in state.items()}


def root_digest(digests: Mapping[str, str]) -> str:
    """blake3 (hex) of a whole state: over the (name, digest) pairs sorted by name."""
    return blake3(json.dumps(sorted(digests.items()), separators=(",", ":")).encode()).hexdigest()


def state_bytes(state: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the state uncompressed."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def clone_state(state: Mapping[str, torch.Tensor]) -> State:
    """A copy that shares no memory with `state`."""
    return {name: tensor.detach().to(device="cpu", copy=True).contiguous() for name, tensor in state.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
