"""Which exponents are told apart: as few classes as cost next to nothing in bytes.

Scans look at eight classes at a time, and elements of the classes beyond cost extra; what a class is worth is how
differently its elements change. Neighbouring exponents whose rates of change differ by a factor of two can share one
for about 1 % of their bytes, so that where time goes into looking, classes are wide, and where changes are dense, each
exponent is its own. The choice is made from a sample of both states and is part of the delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sprawl.delta import kernels
from sprawl.delta.bits import Bits
from sprawl.delta.kernels import EIGHT, MARGIN

HEAVY = 500  # a class with more than one in HEAVY elements counts when classes are merged
_BUDGET = 0.01  # share of the bytes that wider classes may cost
_DENSE = 0.05  # share of changed elements from which time is spent on these, not on the others
_STEP_BITS = 1.5  # of a changed element, besides its position


@dataclass(frozen=True)
class Partition:
    """`starts` are the first keys (exponents) of the classes, ascending from 0; `keys` is how many there are."""

    starts: tuple[int, ...]
    keys: int

    @property
    def classes(self) -> int:
        return len(self.starts)

    @property
    def slots(self) -> int:
        """Entries of per-class arrays: the kernels' window may end beyond the last class."""
        return self.classes + MARGIN

    @cached_property
    def edges(self) -> np.ndarray:
        """First key of every slot and of what follows, uint64 [slots + 1]; slots without a class are empty."""
        return np.array([*self.starts, *[self.keys] * (MARGIN + 1)], np.uint64)

    @cached_property
    def class_of(self) -> np.ndarray:
        """Class of every key: uint16 [keys]."""
        sizes = np.diff([*self.starts, self.keys])
        return np.repeat(np.arange(self.classes, dtype=np.uint16), sizes)

    @property
    def joined(self) -> list[list[int]]:
        """[first, last] key of every class that holds several: what a header has to say."""
        ends = [*self.starts[1:], self.keys]
        return [[start, end - 1] for start, end in zip(self.starts, ends, strict=True) if end - start > 1]


def partition_of(joined: Sequence[Sequence[int]], bits: Bits) -> Partition:
    """Inverse of `Partition.joined`. Raises ValueError when the ranges are none."""
    starts = np.ones(bits.keys, bool)
    behind = 0
    for first, last in joined:
        if not behind <= first < last < bits.keys:
            raise ValueError(f"classes {first} to {last} of {bits.keys}")
        starts[first + 1 : last + 1] = False
        behind = last + 1
    return Partition(tuple(np.flatnonzero(starts).tolist()), bits.keys)


def choose(samples: Iterable[tuple[np.ndarray, np.ndarray, int]], length: int, lanes: Sequence[Bits]) -> Partition:
    """The partition for tensors of which `samples` are old and new words [n], and how many runs to look at.

    The words are of one dtype and contiguous; a run is `length` words.
    """
    keys = lanes[0].keys
    counts, changed = np.zeros(keys, np.int64), np.zeros(keys, np.int64)
    for old, new, runs in samples:
        for bits in lanes:
            kernels.count_keys(old, new, runs, length, bits.form, counts, changed)
    return Partition(tuple(_merge(counts, changed)), keys)


def _bits(counts: np.ndarray, changed: np.ndarray) -> np.ndarray:
    """Bits that positions take in classes of `counts` elements of which `changed` change."""
    share = (changed + 0.25) / (counts + 0.5)
    return -(counts * (share * np.log2(share) + (1 - share) * np.log2(1 - share)))


def _merge(counts: np.ndarray, changed: np.ndarray) -> list[int]:
    """Join the cheapest neighbours among the heavy classes, down to the fewest that the budget allows."""
    starts = list(range(len(counts)))
    total = counts.sum()
    budget = _BUDGET * (_bits(counts, changed).sum() + _STEP_BITS * changed.sum())
    n, c = counts.astype(float), changed.astype(float)
    best, spent = starts, 0.0
    fewest = -(-int((n * HEAVY > total).sum()) // EIGHT)
    while fewest > 1 and changed.sum() < _DENSE * total:
        heavy = n * HEAVY > total
        pairs = np.flatnonzero(heavy[:-1] & heavy[1:])
        if pairs.size == 0:
            break
        apart = _bits(n, c)
        loss = _bits(n[pairs] + n[pairs + 1], c[pairs] + c[pairs + 1]) - apart[pairs] - apart[pairs + 1]
        at = int(pairs[loss.argmin()])
        spent += max(0.0, float(loss.min()))
        if spent > budget:
            break
        n[at], c[at] = n[at] + n[at + 1], c[at] + c[at + 1]
        n, c = np.delete(n, at + 1), np.delete(c, at + 1)
        starts = [*starts[: at + 1], *starts[at + 2 :]]
        eights = -(-int((n * HEAVY > total).sum()) // EIGHT)
        if eights < fewest:  # vectors work on eight classes at once: fewer within a group of eight gain nothing
            fewest, best = eights, starts
    return best
