"""Whole states and tensors: keyframes (plain safetensors) and tensors that a delta sends complete."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import zstandard

from sprawl.delta.state import State, clone_state, raw_bytes
from sprawl.errors import IntegrityError, SprawlError

FRAME = 1 << 23  # bytes of a tensor that are compressed together


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


def pack_tensor(tensor: torch.Tensor) -> list[bytes]:
    """zstd frames of at most `FRAME` bytes each, byte k of every element together, because exponents compress.

    Frames keep the extra memory small and are independent of each other.
    """
    size = tensor.element_size()
    step = FRAME // size
    flat = tensor.detach().contiguous().reshape(-1)
    compressor = zstandard.ZstdCompressor(level=3)
    frames = []
    for start in range(0, flat.numel(), step):
        data = raw_bytes(flat[start : start + step].cpu())
        frames.append(compressor.compress(np.ascontiguousarray(data.reshape(-1, size).T).data.cast("B")))
    return frames


def unpack_tensor(frames: Sequence[bytes | memoryview], dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """Inverse of `pack_tensor`. Raises IntegrityError when the bytes are not `shape` elements of `dtype`."""
    tensor = torch.empty(shape, dtype=dtype)
    size = tensor.element_size()
    target = raw_bytes(tensor)
    step = FRAME // size * size
    decompressor = zstandard.ZstdDecompressor()
    if len(frames) != -(-target.size // step):
        raise IntegrityError(f"a whole tensor has {len(frames)} frames, expected {-(-target.size // step)}")
    for start, frame in zip(range(0, target.size, step), frames, strict=True):
        part = target[start : start + step]
        try:
            planes = decompressor.decompress(frame, max_output_size=part.size)
        except zstandard.ZstdError as error:
            raise IntegrityError(f"a whole tensor does not decompress: {error}") from None
        if len(planes) != part.size:
            raise IntegrityError(f"a whole tensor has a frame of {len(planes)} bytes, expected {part.size}")
        part.reshape(-1, size)[:] = np.frombuffer(planes, np.uint8).reshape(size, -1).T
    return tensor
