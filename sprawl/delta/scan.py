"""Finding what changed, piece by piece, in bounded memory.

Tensors are cut into pieces and pieces gathered into units of at most `UNIT` elements. A unit is scanned on its own,
by any thread; units are joined to segments in order, so the result does not depend on the number of threads. Tensors
on an accelerator are fetched a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sprawl.delta import kernels
from sprawl.delta.bits import BITS, NIBBLES, Bits, holds_nibbles, integer_view
from sprawl.delta.scratch import scratch
from sprawl.delta.state import State

UNIT = 1 << 21
_SAMPLE = 1024  # elements of one sampled run
_RUNS = 16


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a tensor, in row-major order."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Found:
    """The changed elements of a unit: `classes` u16, `gaps` u32 and `steps` [changed], as `kernels.scan` leaves them.

    Per class, int64: `counts` of them, and `passed`, the elements behind the last changed one. `changed` counts them
    per piece, `words` the tensor's own elements (fewer where several nibbles of one changed).
    """

    pieces: list[Piece]
    changed: list[int]
    words: list[int]
    counts: np.ndarray
    passed: np.ndarray
    classes: np.ndarray
    gaps: np.ndarray
    steps: np.ndarray

    @property
    def elements(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


def fetch(tensor: torch.Tensor, start: int, stop: int) -> np.ndarray:
    """Unsigned view of some elements of a contiguous tensor: its own memory on a CPU, a copy from a device."""
    return integer_view(tensor.detach().reshape(-1)[start:stop].cpu())


def sample(tensor: torch.Tensor) -> np.ndarray:
    """Up to 16 evenly spread runs of 1024 elements, as unsigned integers. The same places in tensors of one size."""
    size = tensor.numel()
    if size <= _SAMPLE * _RUNS:
        return fetch(tensor, 0, size)
    starts = np.linspace(0, size - _SAMPLE, _RUNS).astype(np.int64).tolist()
    return np.concatenate([fetch(tensor, start, start + _SAMPLE) for start in starts])


def view_of(tensor: torch.Tensor) -> Bits:
    """How the codec sees a tensor whose dtype is in `BITS`."""
    return NIBBLES if holds_nibbles(tensor.dtype, sample(tensor)) else BITS[tensor.dtype]


def units(names: Sequence[str], state: State) -> Iterator[list[Piece]]:
    """The tensors, cut and gathered: all elements of each, in order, at most `UNIT` to a unit."""
    unit: list[Piece] = []
    room = UNIT
    for name in names:
        size, start = state[name].numel(), 0
        while start < size:
            stop = min(size, start + room)
            unit.append(Piece(name, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield unit
                unit, room = [], UNIT
    if unit:
        yield unit


def form_of(bits: Bits) -> np.ndarray:
    """`bits` as the kernels take them: uint64 [3]."""
    return np.array([bits.sign, bits.shift, bits.mask], np.uint64)


def codes_of(words: np.ndarray, bits: Bits) -> np.ndarray:
    """The elements that are scanned: the words themselves, or their nibbles."""
    if bits is not NIBBLES:
        return words
    codes = np.empty(words.size * 2 * words.itemsize, np.uint8)
    kernels.unpack_nibbles(words, codes)
    return codes


def window(old: np.ndarray, bits: Bits) -> tuple[int, int]:
    """First class and number of classes (a multiple of four) that are worth a vector compare: those with more than 0.2 % of the elements."""
    counts = np.zeros(bits.classes, np.int64)
    for start in range(0, old.size, max(_SAMPLE, old.size // 4)):
        kernels.count_classes(old[start : start + _SAMPLE], form_of(bits), counts)
    common = np.flatnonzero(counts * 500 > counts.sum())
    if common.size == 0:  # no class stands out: any bit pattern at all
        return int(counts.argmax()), 4
    low = int(common.min())
    width = min(-(-(int(common.max()) - low + 1) // 4) * 4, kernels.MAX_WINDOW)
    if low + width <= common.max():  # two far groups of magnitudes: keep the heavier neighbourhood
        low = int(np.convolve(counts, np.ones(width, np.int64), "valid").argmax())
    return low, width


def scan_unit(pieces: list[Piece], base: State, new: State, bits: Bits) -> Found:
    """Compare a unit of two states. Extra memory: at most 18 bytes an element scanned, touched only where changed."""
    limit = sum(piece.stop - piece.start for piece in pieces)
    if bits is NIBBLES:
        limit *= 2 * base[pieces[0].name].element_size()
    classes, gaps = scratch("classes", limit, np.uint16), scratch("gaps", limit, np.uint32)
    steps = scratch("steps", limit, bits.unsigned)
    seen, last, counts = (np.zeros(bits.slots, np.int64) for _ in range(3))
    form = form_of(bits)
    changed, words = [], []
    at = 0
    for piece in pieces:
        old, now = (fetch(state[piece.name], piece.start, piece.stop) for state in (base, new))
        old_codes, new_codes = codes_of(old, bits), codes_of(now, bits)
        low, width = window(old_codes, bits)
        end = kernels.scan(
            old_codes, new_codes, form, low, width, seen, last, counts, classes, gaps, steps, at
        )
        changed.append(end - at)
        words.append(int(kernels.count_changed(old, now)) if bits is NIBBLES else end - at)
        at = end
    kept = (array[:at].copy() for array in (classes, gaps, steps))
    return Found(pieces, changed, words, counts, seen - last, *kept)
