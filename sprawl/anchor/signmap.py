"""sign(M) as bytes: the anchor's entire product, one bit a parameter behind a fixed header.

Layout (little endian): magic "SPSIGN01", uint64 parameter count, int64 fire step, 32 bytes blake3 of the layout
(names and shapes in sorted order), then the bits of all parameters in that order, most significant bit first,
padded with zeros to a whole byte. A bit is 1 where M >= 0, so sign(0) is +1: one bit has no third value, and where
M is exactly zero the gradient it would re-sign is zero in practice too (an embedding row nobody used).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from sprawl.errors import IntegrityError

MAGIC = b"SPSIGN01"
HEADER = struct.Struct("<8sQq32s")
HEADER_BYTES = HEADER.size


def layout_digest(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    lines = "\n".join(f"{name} {'x'.join(map(str, shapes[name]))}" for name in sorted(shapes))
    return blake3(lines.encode()).digest()


def encode_signs(momentum: Mapping[str, Tensor], step: int) -> bytes:
    """Pack sign(M) of fp32 tensors."""
    names = sorted(momentum)
    bits = np.concatenate([(momentum[name] >= 0).flatten().numpy() for name in names])
    shapes = {name: tuple(momentum[name].shape) for name in names}
    return HEADER.pack(MAGIC, bits.size, step, layout_digest(shapes)) + np.packbits(bits).tobytes()


def decode_signs(data: bytes, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, dict[str, Tensor]]:
    """Fire step and bool tensors (True is +1). Raises IntegrityError unless the bytes are a sign map of this model."""
    if len(data) < HEADER_BYTES:
        raise IntegrityError(f"sign map of {len(data)} bytes is shorter than its header")
    magic, count, step, layout = HEADER.unpack_from(data)
    sizes = {name: int(np.prod(shape, dtype=np.int64)) for name, shape in shapes.items()}
    if magic != MAGIC or layout != layout_digest(shapes) or count != sum(sizes.values()):
        raise IntegrityError("sign map does not belong to this model (magic, layout or parameter count differ)")
    if len(data) != HEADER_BYTES + (count + 7) // 8:
        raise IntegrityError(f"sign map has {len(data)} bytes, expected {HEADER_BYTES + (count + 7) // 8}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=HEADER_BYTES), count=count).astype(bool)
    signs, start = {}, 0
    for name in sorted(shapes):
        signs[name] = torch.from_numpy(bits[start : start + sizes[name]]).view(shapes[name])
        start += sizes[name]
    return step, signs
