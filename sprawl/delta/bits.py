"""How each dtype is seen by the codec: as unsigned integers of its width, with an order and exponent classes.

Packed four-bit weights (fp4 codes two to a uint8, int4 eight to an int32) are seen nibble by nibble: whether a code
moves, and where to, depends on the code it was, not on its neighbours in the same word.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from sprawl.delta.state import raw_bytes


@dataclass(frozen=True)
class Bits:
    """Integer view of a dtype.

    An element is `(word >> base) & full` of an unsigned word. `sign` is the sign bit of a sign-magnitude float (0:
    plain integers, ordered modulo 2**width as they are). The key of an element is `(element >> shift) & mask`: a
    float's exponent, or 0 where values have none.
    """

    unsigned: np.dtype
    sign: int
    shift: int
    mask: int
    full: int
    base: int = 0

    @property
    def keys(self) -> int:
        return self.mask + 1

    @cached_property
    def form(self) -> np.ndarray:
        """As the kernels take it: uint64 [5], sign, shift, mask, base, full."""
        return np.array([self.sign, self.shift, self.mask, self.base, self.full], np.uint64)


def _float(width: int, exponent: int, mantissa: int) -> Bits:
    return Bits(np.dtype(f"u{width // 8}"), 1 << (width - 1), mantissa, (1 << exponent) - 1, (1 << width) - 1)


def _integer(width: int) -> Bits:
    return Bits(np.dtype(f"u{width // 8}"), 0, 0, 0, (1 << width) - 1)


BITS: dict[torch.dtype, Bits] = {
    torch.bfloat16: _float(16, 8, 7),
    torch.float16: _float(16, 5, 10),
    torch.float32: _float(32, 8, 23),
    torch.float64: _float(64, 11, 52),
    torch.float8_e4m3fn: _float(8, 4, 3),
    torch.float8_e5m2: _float(8, 5, 2),
    torch.bool: _integer(8),
    torch.uint8: _integer(8),
    torch.int8: _integer(8),
    torch.int16: _integer(16),
    torch.int32: _integer(32),
    torch.int64: _integer(64),
}
"""Dtypes that can be sent as a delta; any other dtype is sent whole when it changes."""


def _nibbles(sign: int) -> tuple[Bits, Bits]:
    """Low and high halves of bytes. Three bits of a code are its key: the magnitude, where one bit is a sign."""
    return Bits(np.dtype("u1"), sign, 0, 7, 15, 0), Bits(np.dtype("u1"), sign, 0, 7, 15, 4)


PACKED: dict[torch.dtype, tuple[Bits, Bits]] = {torch.uint8: _nibbles(8), torch.int32: _nibbles(0)}
"""Dtypes that may hold packed codes, and how these are seen in the bytes: fp4 as sign and magnitude, int4 plain."""

_NIBBLE_BITS = 2.5  # entropy per position above which the words of a tensor are taken for packed codes


def holds_nibbles(sample: np.ndarray) -> bool:
    """Whether words (unsigned, any shape) look like packed four-bit codes: no nibble position is predictable.

    Block scales, indices and masks leave some positions nearly constant. A wrong guess costs bytes, never bits of
    the result: which view was taken is part of the delta.
    """
    if sample.size < 64:
        return False
    for position in range(sample.itemsize * 2):
        codes = (sample >> sample.dtype.type(4 * position)) & sample.dtype.type(15)
        share = np.bincount(codes.astype(np.int64).reshape(-1), minlength=16) / sample.size
        if -(share[share > 0] * np.log2(share[share > 0])).sum() < _NIBBLE_BITS:
            return False
    return True


def integer_view(tensor: torch.Tensor) -> np.ndarray:
    """Unsigned integers [numel] that share memory with the contiguous `tensor` (dtype in `BITS`)."""
    return raw_bytes(tensor).view(BITS[tensor.dtype].unsigned)
