"""Decoded deltas as bytes: a journal that can be replayed without the weights it was decoded against.

    magic 8 bytes | blake3 of everything after it, 32 bytes | u32 size of header | JSON header | raw arrays

A torn or flipped journal is refused as a whole, so that a crash while it was written leaves nothing to replay.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from sprawl.delta.codec import Overwrites
from sprawl.delta.segment import Patch
from sprawl.delta.state import dtype_name, raw_bytes
from sprawl.errors import IntegrityError

MAGIC = b"SPRWLJNL"
_PREFIX = len(MAGIC) + 32


def pack_overwrites(overwrites: Overwrites, note: dict[str, Any]) -> list[bytes | memoryview]:
    """The journal of `overwrites` with the JSON-able `note` beside them, in pieces to be written one after the other.

    Most of them are views of `overwrites`: a journal needs no memory of its own.
    """
    parts: list[bytes | memoryview] = []
    patches = []
    for name, patch in overwrites.patches.items():
        patches.append([name, int(patch.indices.size), patch.indices.dtype.str, patch.values.dtype.str])
        parts += [_bytes(patch.indices), _bytes(patch.values)]
    whole = []
    for name, tensor in overwrites.whole.items():
        whole.append([name, dtype_name(tensor.dtype), list(tensor.shape)])
        parts.append(raw_bytes(tensor).data)
    header = {"note": note, "patches": patches, "whole": whole, "removed": overwrites.removed}
    text = json.dumps(header, separators=(",", ":")).encode()
    body = [struct.pack("<I", len(text)) + text, *parts]
    hasher = blake3()
    for part in body:
        hasher.update(part)
    return [MAGIC + hasher.digest(), *body]


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def unpack_overwrites(blob: bytes, name: str) -> tuple[Overwrites, dict[str, Any]]:
    """Inverse of `pack_overwrites`. Raises IntegrityError naming the journal (`name`) when it is torn or damaged."""
    body = memoryview(blob)[_PREFIX:]
    if blob[: len(MAGIC)] != MAGIC or len(body) < 4 or blake3(body).digest() != blob[len(MAGIC) : _PREFIX]:
        raise IntegrityError(f"{name} is not an intact journal")
    (size,) = struct.unpack("<I", body[:4])
    header = json.loads(bytes(body[4 : 4 + size]))
    at = 4 + size
    patches: dict[str, Patch] = {}
    for tensor, count, index_dtype, value_dtype in header["patches"]:
        indices = np.frombuffer(body, np.dtype(index_dtype), count, at)
        at += indices.nbytes
        values = np.frombuffer(body, np.dtype(value_dtype), count, at)
        at += values.nbytes
        patches[tensor] = Patch(indices.copy(), values.copy())
    whole: dict[str, torch.Tensor] = {}
    for tensor, dtype, shape in header["whole"]:
        target = torch.empty(shape, dtype=getattr(torch, dtype))
        raw = raw_bytes(target)
        raw[:] = np.frombuffer(body, np.uint8, raw.size, at)
        at += raw.size
        whole[tensor] = target
    return Overwrites(patches, whole, list(header["removed"])), header["note"]
