"""Segments: the changed elements of neighbouring pieces of one dtype, as entropy-coded streams.

Whether a weight moved in a step depends on its magnitude against the update (push versus floor), and the receiver
knows the old magnitudes. So elements are split by the exponent of the *old* value (`Partition`); within each class,
positions are gap-coded and new values are steps in the ordered integers of the dtype.
Pieces share a segment because the streams of a small one would be dominated by their headers; a segment ends when it
holds enough changes for that, so that segments are coded in parallel and in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sprawl.delta import halves, kernels
from sprawl.delta.bits import Bits
from sprawl.delta.partition import Partition, partition_of
from sprawl.delta.rans import decode_values, encode_values
from sprawl.delta.scan import Found
from sprawl.delta.scratch import scratch
from sprawl.errors import IntegrityError

MAX_ELEMENTS = 1 << 27  # a segment ends with the unit that reaches this many elements
MAX_CHANGED = 1 << 18  # or this many changed ones
LIMIT = (1 << 32) - 1  # ranks and indices are u32


@dataclass(frozen=True)
class Patch:
    """New values of some elements of a tensor: `indices` u32 [k] into the flat tensor, each once, and `values` [k].

    Indices come in no particular order, except that distant ones ascend, which is what writing them likes.
    """

    indices: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Segment:
    """`header` is JSON-able: changed elements per class, and the streams; `payload` are the streams."""

    header: dict[str, Any]
    payload: bytes


def batches(found: Iterable[Found]) -> Iterator[list[Found]]:
    """Units joined to segments. Units without a change at the end of one are part of it."""
    batch: list[Found] = []
    elements = changed = 0
    for unit in found:
        batch.append(unit)
        elements += unit.elements
        changed += unit.gaps.size
        if elements >= MAX_ELEMENTS or changed >= MAX_CHANGED:
            yield batch
            batch, elements, changed = [], 0, 0
    if batch:
        yield batch


def _join(units: list[Found], slots: int, bits: Bits) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    counts = np.sum([unit.counts for unit in units], axis=0)
    total = int(counts.sum())
    gaps, steps = scratch("segment_gaps", total, np.uint32), scratch("segment_steps", total, bits.unsigned)
    cursor = np.concatenate(([0], np.cumsum(counts)[:-1]))
    carry = np.zeros(slots, np.int64)
    for unit in units:
        kernels.group_by_class(unit.classes, unit.gaps, unit.steps, unit.passed, carry, cursor, gaps, steps)
    return counts, gaps, steps


def encode_segment(units: list[Found], partition: Partition, bits: Bits) -> Segment:
    """Code the changed elements of `units`, in order. The payload is empty when there are none."""
    counts, gaps, steps = _join(units, partition.slots, bits)
    if gaps.size == 0:
        return Segment({}, b"")
    signed = steps.view(f"i{bits.unsigned.itemsize}")
    used = np.flatnonzero(counts)
    numbers = counts[used].tolist()
    parts = encode_values(gaps, numbers), encode_values(signed, numbers)
    classes = [[c, n] for c, n in zip(used.tolist(), numbers, strict=True)]
    return Segment({"joined": partition.joined, "classes": classes, "gaps": len(parts[0])}, b"".join(parts))


def decode_segment(
    olds: list[tuple[np.ndarray, int]],
    found: list[list[Patch]],
    header: dict[str, Any],
    payload: memoryview,
    lanes: tuple[Bits, ...],
) -> None:
    """Fill `found`, a patch for each piece of the segment and lane, of the sizes that the pieces' counts say.

    `olds` are the pieces' intact old words, and where in their tensor they start. Raises IntegrityError when the
    streams are damaged or do not belong to `olds`.
    """
    bits, partition = lanes[0], partition_of(header["joined"], lanes[0])
    classes, numbers = zip(*header["classes"], strict=True)
    total = sum(numbers)
    counted = sum(patch.indices.size for patches in found for patch in patches)
    if total != counted or min(numbers) < 1 or not all(0 <= c < partition.classes for c in classes):
        raise IntegrityError("a delta segment's header contradicts itself")
    gaps, steps = scratch("segment_gaps", total, np.uint32), scratch("segment_steps", total, bits.unsigned)
    decode_values(bytes(payload[: header["gaps"]]), numbers, gaps)
    decode_values(bytes(payload[header["gaps"] :]), numbers, steps.view(f"i{bits.unsigned.itemsize}"))
    cursor, end = np.zeros(partition.slots, np.uint64), np.zeros(partition.slots, np.uint64)
    due = np.full(partition.slots, kernels.NEVER)
    at = 0
    for class_, count in zip(classes, numbers, strict=True):
        cursor[class_], end[class_] = at, at + count
        due[class_] = int(gaps[at]) - 1
        at += count
    ways, streams = (partition.class_of, partition.edges), (due, cursor, end, gaps, steps)
    for (old, start), patches in zip(olds, found, strict=True):
        for lane, patch in zip(lanes, patches, strict=True):
            count = kernels.locate(old, lane.form, *ways, *streams, start, patch.indices, patch.values)
            if count != patch.indices.size:
                raise IntegrityError("a delta segment does not belong to the state it is applied to")


def merge_lanes(octets: np.ndarray, start: int, low: Patch, high: Patch) -> Patch:
    """The patch of `octets`, the first of which is number `start` of its tensor, from those of its nibbles."""
    limit = low.indices.size + high.indices.size
    indices, values = np.empty(limit, np.uint32), np.empty(limit, np.uint8)
    ascending = *halves.in_order(low.indices, low.values), *halves.in_order(high.indices, high.values)
    count = halves.merge_halves(octets, start, *ascending, indices, values)
    return Patch(indices[:count], values[:count])


def words_patch(words: np.ndarray, octets: Patch) -> Patch:
    """A patch of the bytes of `words` as one of the words themselves."""
    indices, values = np.empty(octets.indices.size, np.uint32), np.empty(octets.indices.size, words.dtype)
    count = halves.octets_to_words(words, octets.indices, octets.values, indices, values)
    return Patch(indices[:count], values[:count])
