"""The three encodings that other systems send weight updates in, written from their described formats.

    xor         byte-wise XOR of old and new, zstd level 1                               slime, miles, SkyRL
    overwrite   positions of the changed bytes as u32, then the new bytes, zstd level 1  slime
    coo         gaps between changed elements in the narrowest of u8/u16/i32, then the
                new elements, zstd level 1                                               grail (PULSE)

One blob a tensor, as they do. numpy throughout, in place where that is possible: no cost that their own code avoids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zstandard

LEVEL = 1


@dataclass(frozen=True)
class Peer:
    """`encode(old, new) -> blob` and `apply(target, blob)`, both on unsigned integer views [n] of one tensor."""

    name: str
    encode: Callable[[np.ndarray, np.ndarray], bytes]
    apply: Callable[[np.ndarray, bytes], None]


def _pack(*arrays: np.ndarray) -> bytes:
    """zstd of the arrays one after the other, without joining them first."""
    stream = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=sum(array.nbytes for array in arrays))
    return b"".join([*(stream.compress(array.data.cast("B")) for array in arrays if array.size), stream.flush()])


def _unpack(blob: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(blob)


def _xor_encode(old: np.ndarray, new: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.bitwise_xor(old, new).data.cast("B"))


def _xor_apply(target: np.ndarray, blob: bytes) -> None:
    np.bitwise_xor(target, np.frombuffer(_unpack(blob), target.dtype), out=target)


def _overwrite_encode(old: np.ndarray, new: np.ndarray) -> bytes:
    before, after = old.view(np.uint8), new.view(np.uint8)
    positions = np.flatnonzero(before != after).astype(np.uint32)
    return _pack(positions, after[positions])


def _overwrite_apply(target: np.ndarray, blob: bytes) -> None:
    data = _unpack(blob)
    count = len(data) // 5
    target.view(np.uint8)[np.frombuffer(data, np.uint32, count)] = np.frombuffer(data, np.uint8, count, 4 * count)


_GAPS = (np.uint8, np.uint16, np.int32)


def _coo_encode(old: np.ndarray, new: np.ndarray) -> bytes:
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=0)
    widest = int(gaps.max(initial=0))
    kind = next(index for index, dtype in enumerate(_GAPS) if widest <= np.iinfo(dtype).max)
    return bytes([kind]) + _pack(gaps.astype(_GAPS[kind]), new[positions])


def _coo_apply(target: np.ndarray, blob: bytes) -> None:
    data, dtype = _unpack(blob[1:]), np.dtype(_GAPS[blob[0]])
    count = len(data) // (dtype.itemsize + target.itemsize)
    positions = np.cumsum(np.frombuffer(data, dtype, count), dtype=np.int64)
    target[positions] = np.frombuffer(data, target.dtype, count, dtype.itemsize * count)


PEERS = (
    Peer("xor", _xor_encode, _xor_apply),
    Peer("overwrite", _overwrite_encode, _overwrite_apply),
    Peer("coo", _coo_encode, _coo_apply),
)
