"""Whole states and tensors: keyframes (plain safetensors) and tensors that a delta sends complete."""

from __future__ import annotations

import numpy as np
import torch
import zstandard

from sprawl.delta.state import State, clone_state, raw_bytes
from sprawl.errors import IntegrityError, SprawlError


def encode_whole(state: State) -> bytes:
    """A keyframe: safetensors bytes that Hugging Face tools load as they are. Deterministic.

    Raises SprawlError for tensors that share memory or dtypes safetensors does not know.
    """
    from safetensors.torch import save

    contiguous = {name: tensor.detach().contiguous() for name, tensor in state.items()}
    try:
        return save(contiguous, metadata={"format": "pt"})
    except (RuntimeError, ValueError, KeyError) as error:
        raise SprawlError(f"this state cannot be written as safetensors: {' '.join(str(error).split())}") from None


def decode_whole(blob: bytes, name: str = "keyframe") -> State:
    """The state of a keyframe, in memory of its own. Raises IntegrityError naming the blob (`name`)."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return clone_state(load(blob))
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise IntegrityError(f"{name} is not valid safetensors: {' '.join(str(error).split())}") from None


def pack_tensor(tensor: torch.Tensor) -> bytes:
    """zstd over byte planes: byte k of every element together, because exponents compress and mantissas do not."""
    data = raw_bytes(tensor)
    planes = np.ascontiguousarray(data.reshape(-1, tensor.element_size()).T).reshape(-1)
    return zstandard.ZstdCompressor(level=3).compress(planes.data)


def unpack_tensor(data: bytes, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """Inverse of `pack_tensor`. Raises IntegrityError when the bytes are not `shape` elements of `dtype`."""
    tensor = torch.empty(shape, dtype=dtype)
    size = tensor.element_size()
    try:
        planes = zstandard.ZstdDecompressor().decompress(data, max_output_size=max(1, tensor.numel() * size))
    except zstandard.ZstdError as error:
        raise IntegrityError(f"a whole tensor does not decompress: {error}") from None
    if len(planes) != tensor.numel() * size:
        raise IntegrityError(f"a whole tensor has {len(planes)} bytes, expected {tensor.numel() * size}")
    raw_bytes(tensor)[:] = np.frombuffer(planes, np.uint8).reshape(size, -1).T.reshape(-1)
    return tensor
