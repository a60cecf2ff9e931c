"""Safetensors shards of the disk layout, as bytes."""

from __future__ import annotations

import json
import struct

import numpy as np
import torch

from sprawl.delta.state import State, clone_state
from sprawl.errors import IntegrityError

_SHARD_BYTES = 4 << 30


def pack_blobs(blobs: dict[str, bytes], checksums: dict[str, str]) -> bytes:
    """A delta's shard: one U8 tensor a blob, the checksums as metadata."""
    from safetensors.numpy import save

    return save({name: np.frombuffer(blob, np.uint8) for name, blob in blobs.items()}, metadata=checksums)


def unpack_blobs(data: bytes, name: str) -> tuple[dict[str, bytes], dict[str, str]]:
    """Inverse of `pack_blobs`. Raises IntegrityError naming the shard (`name`)."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(data)
        (size,) = struct.unpack("<Q", data[:8])
        checksums = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    except (SafetensorError, ValueError, struct.error, KeyError) as error:
        raise IntegrityError(f"{name} is not valid safetensors: {' '.join(str(error).split())}") from None
    if any(array.dtype != np.uint8 or array.ndim != 1 for array in arrays.values()):
        raise IntegrityError(f"{name} holds something else than U8 blobs")
    return {tensor: array.tobytes() for tensor, array in arrays.items()}, checksums


def pack_state(state: State) -> bytes:
    """A full version's shard."""
    from safetensors.torch import save

    return save({name: tensor.contiguous() for name, tensor in state.items()}, metadata={"format": "pt"})


def unpack_state(data: bytes, name: str) -> State:
    """Inverse of `pack_state`, in memory of its own. Raises IntegrityError naming the shard (`name`)."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return clone_state(load(data))
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise IntegrityError(f"{name} is not valid safetensors: {' '.join(str(error).split())}") from None


def split(state: State, limit: int = _SHARD_BYTES) -> list[list[str]]:
    """Names grouped into shards of at most `limit` bytes (one tensor may be larger), in sorted order."""
    groups: list[list[str]] = []
    room = 0
    for name in sorted(state):
        size = _bytes(state[name])
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
