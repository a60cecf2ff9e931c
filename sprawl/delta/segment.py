"""Segments: the changed elements of neighbouring pieces of one dtype, as entropy-coded streams.

Whether a weight moved in a step depends on its magnitude against the update (push versus floor), and the receiver
knows the old magnitudes. So elements are split by the exponent of the *old* value; within each such class, positions
are gap-coded and new values are steps in the ordered integers of the dtype. Classes with few changes share a stream.
Pieces share a segment because the streams of a small one would be dominated by their headers; a segment ends when it
holds enough changes for that, so that segments are coded in parallel and in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sprawl.delta import kernels
from sprawl.delta.bits import NIBBLES, Bits
from sprawl.delta.rans import decode_values, encode_values
from sprawl.delta.scan import Found, codes_of, form_of, window
from sprawl.delta.scratch import scratch
from sprawl.errors import IntegrityError

MAX_ELEMENTS = 1 << 26  # a segment ends with the unit that reaches this many elements
MAX_CHANGED = 1 << 18  # or this many changed ones
LIMIT = (1 << 32) - 1  # ranks and indices are u32
_MIN_STREAM = 2048  # changed elements below which neighbouring classes share a stream


@dataclass(frozen=True)
class Patch:
    """New values of some elements of a tensor: `indices` u32 [k] into the flat tensor, ascending, `values` [k]."""

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


def _group_classes(counts: list[int]) -> list[int]:
    """How many neighbouring classes each stream holds: as few as give it `_MIN_STREAM` elements."""
    groups: list[int] = []
    held = 0
    for count in counts:
        if groups and held < _MIN_STREAM:
            groups[-1] += 1
            held += count
        else:
            groups.append(1)
            held = count
    if len(groups) > 1 and held < _MIN_STREAM:
        last = groups.pop()
        groups[-1] += last
    return groups


def _join(units: list[Found], bits: Bits) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    counts = np.sum([unit.counts for unit in units], axis=0)
    total = int(counts.sum())
    gaps, steps = scratch("segment_gaps", total, np.uint32), scratch("segment_steps", total, bits.unsigned)
    cursor = np.concatenate(([0], np.cumsum(counts)[:-1]))
    carry = np.zeros(bits.slots, np.int64)
    for unit in units:
        kernels.group_by_class(unit.classes, unit.gaps, unit.steps, unit.passed, carry, cursor, gaps, steps)
    return counts, gaps, steps


def encode_segment(units: list[Found], bits: Bits) -> Segment:
    """Code the changed elements of `units`, in order."""
    counts, gaps, steps = _join(units, bits)
    signed = steps.view(f"i{bits.unsigned.itemsize}")
    used = np.flatnonzero(counts)
    used_counts = [int(count) for count in counts[used]]
    streams, parts, offset, member = [], [], 0, 0
    for size in _group_classes(used_counts):
        end = offset + sum(used_counts[member : member + size])
        gap_bytes = encode_values(gaps[offset:end])
        step_bytes = encode_values(signed[offset:end])
        parts += [gap_bytes, step_bytes]
        streams.append([end - offset, len(gap_bytes), len(step_bytes)])
        offset, member = end, member + size
    header = {"classes": [[int(c), n] for c, n in zip(used, used_counts, strict=True)], "streams": streams}
    return Segment(header, b"".join(parts))


def decode_segment(
    olds: list[tuple[np.ndarray, int]], changed: list[int], header: dict[str, Any], payload: memoryview, bits: Bits
) -> list[Patch]:
    """The patches of the segment's pieces: `olds` are their intact old words and where in their tensor they start.

    Raises IntegrityError when the streams are damaged or do not belong to `olds`.
    """
    total = sum(changed)
    gaps, steps = scratch("segment_gaps", total, np.uint32), scratch("segment_steps", total, bits.unsigned)
    signed = steps.view(f"i{bits.unsigned.itemsize}")
    offset = position = 0
    for count, gap_size, step_size in header["streams"]:
        middle, stop = position + gap_size, position + gap_size + step_size
        decode_values(bytes(payload[position:middle]), gaps[offset : offset + count])
        decode_values(bytes(payload[middle:stop]), signed[offset : offset + count])
        offset, position = offset + count, stop
    cursor, end = np.zeros(bits.slots, np.uint64), np.zeros(bits.slots, np.uint64)
    due = np.full(bits.slots, kernels.NEVER)
    at = 0
    for class_, count in header["classes"]:
        cursor[class_], end[class_] = at, at + count
        due[class_] = int(gaps[at]) - 1
        at += count
    if offset != total or at != total or position != len(payload):
        raise IntegrityError("a delta segment's header disagrees with its streams")
    patches = []
    for (old, start), count in zip(olds, changed, strict=True):
        codes = codes_of(old, bits)
        indices, values = np.empty(count, np.uint32), np.empty(count, bits.unsigned)
        first = 0 if bits is NIBBLES else start
        low, width = window(codes, bits)
        found = kernels.locate(
            codes, form_of(bits), low, width, due, cursor, end, gaps, steps, first, indices, values
        )
        if found != count:
            raise IntegrityError("a delta segment does not belong to the state it is applied to")
        patches.append(_fold(old, start, indices, values) if bits is NIBBLES else Patch(indices, values))
    return patches


def _fold(words: np.ndarray, start: int, codes_at: np.ndarray, codes: np.ndarray) -> Patch:
    indices, values = np.empty(codes.size, np.uint32), np.empty(codes.size, words.dtype)
    count = kernels.fold_nibbles(words, start, codes_at, codes, indices, values)
    return Patch(indices[:count], values[:count])
