"""Finding what changed, piece by piece, in bounded memory.

Tensors are cut into pieces and pieces gathered into units of at most `UNIT` elements. A unit is scanned on its own,
by any thread; units are joined to segments in order, so the result does not depend on the number of threads. Tensors
on an accelerator are fetched a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from sprawl.delta import kernels
from sprawl.delta.bits import Bits, integer_view
from sprawl.delta.partition import Partition, choose
from sprawl.delta.scratch import scratch
from sprawl.delta.state import State

UNIT = 1 << 22
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


def fetch(tensor: torch.Tensor, start: int, stop: int) -> np.ndarray:
    """Unsigned view of some elements of a contiguous tensor: its own memory on a CPU, a copy from a device."""
    if tensor.device.type == "cpu":
        return integer_view(tensor)[start:stop]
    return integer_view(tensor.reshape(-1)[start:stop].cpu())


def sample(tensor: torch.Tensor, runs: int = _RUNS) -> np.ndarray:
    """Unsigned [runs, 1024]: evenly spread runs of a large tensor; [n], all of a small one. Where depends on size."""
    size = tensor.numel()
    if size <= _SAMPLE * runs:
        return fetch(tensor, 0, size)
    run = size // runs
    if tensor.device.type == "cpu":
        return integer_view(tensor)[: run * runs].reshape(runs, run)[:, :_SAMPLE]
    return integer_view(tensor.reshape(-1)[: run * runs].reshape(runs, run)[:, :_SAMPLE].cpu()).reshape(runs, -1)


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


def choose_partition(names: Sequence[str], base: State, new: State, lanes: tuple[Bits, ...]) -> Partition:
    """The classes for a delta of these tensors, from a sample of each."""
    pairs = [(_spread(base[name]), _spread(new[name])) for name in names]
    return choose([old for old, _ in pairs], [now for _, now in pairs], lanes)


def _spread(tensor: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(sample(tensor, min(4096, max(2 * _RUNS, tensor.numel() >> 18)))).reshape(-1)


def scan_unit(pieces: list[Piece], base: State, new: State, lanes: tuple[Bits, ...], partition: Partition) -> Found:
    """Compare a unit of two states, in one pass for each lane.

    Extra memory: at most 14 bytes an element and lane, kept by the thread, touched only as far as there are changes.
    """
    limit = sum(piece.stop - piece.start for piece in pieces) * len(lanes)
    classes, gaps = scratch("classes", limit, np.uint16), scratch("gaps", limit, np.uint32)
    steps = scratch("steps", limit, lanes[0].unsigned)
    seen, last, counts = (np.zeros(partition.slots, np.int64) for _ in range(3))
    touched = np.zeros(1, np.int64)
    ways = partition.class_of, partition.edges
    changed = []
    at = 0
    for piece in pieces:
        old, now = (fetch(state[piece.name], piece.start, piece.stop) for state in (base, new))
        ends = [at]
        for bits in lanes:
            at = kernels.scan(old, now, bits.form, *ways, seen, last, counts, touched, classes, gaps, steps, at)
            ends.append(at)
        changed.append([stop - start for start, stop in pairwise(ends)])
    return Found(pieces, changed, counts, seen - last, classes[:at].copy(), gaps[:at].copy(), steps[:at].copy())
