"""Finding what changed, piece by piece, in bounded memory.

Tensors are cut into pieces and pieces gathered into units of at most `UNIT` elements. A unit is scanned on its own,
by any thread; units are joined to segments in order, so the result does not depend on the number of threads. Tensors
on an accelerator are fetched a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from sprawl.delta import kernels
from sprawl.delta.bits import Bits, integer_view
from sprawl.delta.partition import Partition, choose
from sprawl.delta.scratch import scratch

UNIT = 1 << 21
_LENGTH = 256  # elements of a run that is sampled to choose a partition: one element in
_SAMPLED = 256  # is, but no fewer than
_FEWEST = 1 << 16  # in all, and no more than
_MOST = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a tensor, in row-major order."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Found:
    """The changed elements of a unit: `classes` u16, `gaps` u32 and `steps` [changed], as `kernels.scan` leaves them.

    Per class, int64 [slots]: `counts` of them, and `passed`, the elements behind the last changed one. `changed`
    counts them per piece, for each lane of the view.
    """

    pieces: list[Piece]
    changed: list[list[int]]
    counts: np.ndarray
    passed: np.ndarray
    classes: np.ndarray
    gaps: np.ndarray
    steps: np.ndarray

    @property
    def elements(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


Words = np.ndarray | torch.Tensor
"""Elements of a contiguous tensor: unsigned integers [n] in its own memory, or the tensor if that is on a device."""
Source = Mapping[str, Words]


def words_of(tensor: torch.Tensor) -> Words:
    return integer_view(tensor) if tensor.device.type == "cpu" else tensor.reshape(-1)


def fetch(words: Words, start: int, stop: int) -> np.ndarray:
    """Some elements, unsigned: the memory itself on a CPU, a copy from a device."""
    if isinstance(words, np.ndarray):
        return words[start:stop]
    return integer_view(words[start:stop].cpu())


def size_of(words: Words) -> int:
    return words.size if isinstance(words, np.ndarray) else words.numel()


def sample(words: Words, runs: int, length: int) -> np.ndarray:
    """Unsigned [runs, length]: evenly spread runs of many elements; [n], all of a few. Where depends on size."""
    size = size_of(words)
    if size <= length * runs:
        return fetch(words, 0, size)
    some = words[: size // runs * runs].reshape(runs, -1)[:, :length]
    return some if isinstance(some, np.ndarray) else integer_view(some.cpu()).reshape(runs, -1)


def near(words: Words, runs: int, length: int) -> np.ndarray:
    """What a kernel that looks at `runs` runs of `length` elements needs of `words`: only those, from a device."""
    return words if isinstance(words, np.ndarray) else sample(words, runs, length).reshape(-1)


def units(names: Sequence[str], source: Source) -> Iterator[list[Piece]]:
    """The tensors, cut and gathered: all elements of each, in order, at most `UNIT` to a unit."""
    unit: list[Piece] = []
    room = UNIT
    for name in names:
        size, start = size_of(source[name]), 0
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


def choose_partition(names: Sequence[str], base: Source, new: Source, lanes: tuple[Bits, ...]) -> Partition:
    """The classes for a delta of these tensors, from a sample of each."""
    total = sum(size_of(base[name]) for name in names)
    share = min(max(total // _SAMPLED, _FEWEST), _MOST) / total

    def samples() -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        for name in names:
            runs = max(1, round(size_of(base[name]) * share / _LENGTH))
            yield near(base[name], runs, _LENGTH), near(new[name], runs, _LENGTH), runs

    return choose(samples(), _LENGTH, lanes)


def scan_unit(pieces: list[Piece], base: Source, new: Source, lanes: tuple[Bits, ...], partition: Partition) -> Found:
    """Compare a unit of two states, in one pass for each lane.

    Extra memory: at most 14 bytes an element and lane, kept by the thread, touched only as far as there are changes.
    """
    limit = sum(piece.stop - piece.start for piece in pieces) * len(lanes)
    classes, gaps = scratch("classes", limit, np.uint16), scratch("gaps", limit, np.uint32)
    steps = scratch("steps", limit, lanes[0].unsigned)
    seen, last, counts = (np.zeros(partition.slots, np.int64) for _ in range(3))
    ways = partition.class_of, partition.edges
    changed = []
    at = 0
    for piece in pieces:
        old, now = (fetch(source[piece.name], piece.start, piece.stop) for source in (base, new))
        ends = [at]
        for bits in lanes:
            at = kernels.scan(old, now, bits.form, *ways, seen, last, counts, classes, gaps, steps, at)
            ends.append(at)
        changed.append([stop - start for start, stop in pairwise(ends)])
    return Found(pieces, changed, counts, seen - last, classes[:at].copy(), gaps[:at].copy(), steps[:at].copy())
