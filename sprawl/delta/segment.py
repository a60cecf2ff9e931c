"""Segments: the changed elements of several tensors of one dtype, as entropy-coded streams.

Whether a weight moved in a step depends on its magnitude against the update (push versus floor), and the receiver
knows the old magnitudes. So elements are split by the exponent of the *old* value; within each such class, positions
are gap-coded and new values are steps in the ordered integers of the dtype. Classes with few changes share a stream.
Tensors share a segment because the streams of a small one would be dominated by their headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

from sprawl.delta import kernels
from sprawl.delta.bits import Bits
from sprawl.errors import IntegrityError

MAX_ELEMENTS = 1 << 24  # of a segment that holds more than one tensor
LIMIT = (1 << 32) - 1  # ranks and indices are u32
_MIN_STREAM = 2048  # changed elements below which neighbouring classes share a stream
_PCO = ChunkConfig(mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())


@dataclass(frozen=True)
class Patch:
    """New values of some elements of a tensor: `indices` u32 [k] into the flat tensor, `values` unsigned [k]."""

    indices: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Segment:
    """`header` is JSON-able: changed elements per tensor, per class, and the streams; `payload` are the streams."""

    header: dict[str, Any]
    payload: bytes


def _parameters(bits: Bits) -> tuple[np.uint64, np.uint64, np.uint64]:
    return np.uint64(bits.sign), np.uint64(bits.shift), np.uint64(bits.mask)


def _stream_dtype(bits: Bits) -> np.dtype:
    # pcodec takes 16 bits and up; 8-bit steps are widened (sign kept: it is entropy-coded anyway).
    return np.dtype(f"i{max(2, bits.unsigned.itemsize)}")


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


def encode_segment(pairs: list[tuple[np.ndarray, np.ndarray]], changed: list[int], bits: Bits) -> Segment:
    """Encode the changed elements of (old, new) integer views, in order. `changed` counts them per pair."""
    total = sum(changed)
    classes = np.empty(total, np.uint16)
    gaps = np.empty(total, np.uint32)
    steps = np.empty(total, bits.unsigned)
    seen = np.zeros(bits.classes, np.int64)
    last = np.zeros(bits.classes, np.int64)
    at = 0
    for old, new in pairs:
        at = kernels.scan(old, new, *_parameters(bits), seen, last, classes, gaps, steps, at)
    counts = np.bincount(classes, minlength=bits.classes)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    sorted_gaps, sorted_steps = np.empty_like(gaps), np.empty_like(steps)
    kernels.group_by_class(classes, gaps, steps, starts.astype(np.int64), sorted_gaps, sorted_steps)
    signed = sorted_steps.view(f"i{bits.unsigned.itemsize}").astype(_stream_dtype(bits), copy=False)

    used = np.flatnonzero(counts)
    used_counts = [int(count) for count in counts[used]]
    streams, parts, offset, member = [], [], 0, 0
    for size in _group_classes(used_counts):
        end = offset + sum(used_counts[member : member + size])
        gap_bytes = standalone.simple_compress(sorted_gaps[offset:end], _PCO)
        step_bytes = standalone.simple_compress(signed[offset:end], _PCO)
        parts += [gap_bytes, step_bytes]
        streams.append([end - offset, len(gap_bytes), len(step_bytes)])
        offset, member = end, member + size
    header = {
        "changed": changed,
        "classes": [[int(c), n] for c, n in zip(used, used_counts, strict=True)],
        "streams": streams,
    }
    return Segment(header, b"".join(parts))


def _decompress(data: bytes, count: int, dtype: np.dtype) -> np.ndarray:
    values = np.empty(count, dtype)
    try:
        progress = standalone.simple_decompress_into(data, values)
    except (RuntimeError, TypeError) as error:
        raise IntegrityError(f"a delta stream does not decode: {' '.join(str(error).split())}") from None
    if progress.n_processed != count or not progress.finished:
        raise IntegrityError(f"a delta stream holds {progress.n_processed} values where its header says {count}")
    return values


def decode_segment(olds: list[np.ndarray], header: dict[str, Any], payload: memoryview, bits: Bits) -> list[Patch]:
    """The patches of the segment's tensors, from their intact old values.

    Raises IntegrityError when the streams are damaged or do not belong to `olds`.
    """
    changed: list[int] = header["changed"]
    total = sum(changed)
    gaps = np.empty(total, np.uint32)
    steps = np.empty(total, bits.unsigned)
    offset = position = 0
    for count, gap_size, step_size in header["streams"]:
        middle, stop = position + gap_size, position + gap_size + step_size
        gaps[offset : offset + count] = _decompress(bytes(payload[position:middle]), count, np.dtype(np.uint32))
        signed = _decompress(bytes(payload[middle:stop]), count, _stream_dtype(bits))
        steps[offset : offset + count] = signed.astype(f"i{bits.unsigned.itemsize}", copy=False).view(bits.unsigned)
        offset, position = offset + count, stop
    cursor = np.zeros(bits.classes, np.int64)
    end = np.zeros(bits.classes, np.int64)
    due = np.full(bits.classes, kernels.NEVER)
    at = 0
    for class_, count in header["classes"]:
        cursor[class_], end[class_] = at, at + count
        due[class_] = gaps[at]
        at += count
    if offset != total or at != total or position != len(payload):
        raise IntegrityError("a delta segment's header disagrees with its streams")
    seen = np.zeros(bits.classes, np.int64)
    patches = []
    for old, count in zip(olds, changed, strict=True):
        patch = Patch(np.empty(count, np.uint32), np.empty(count, bits.unsigned))
        found = kernels.locate(
            old, *_parameters(bits), seen, due, cursor, end, gaps, steps, patch.indices, patch.values
        )
        if found != count:
            raise IntegrityError("a delta segment does not belong to the state it is applied to")
        patches.append(patch)
    return patches
