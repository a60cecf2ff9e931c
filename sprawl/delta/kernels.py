"""Compiled inner loops of the codec. All take unsigned integer views and work modulo 2**width: never float addition.

Conventions: `old`, `new` uint8/16/32/64 [n]; `sign`, `shift`, `mask` uint64 as in `sprawl.delta.bits.Bits`.
Per class (exponent of the old value): `seen` int64 counts elements met so far, `last` int64 the rank of the last
changed one. Ranks run over all tensors of a segment, in order, so that small tensors share statistics.
"""

from __future__ import annotations

import numpy as np
from numba import njit

NEVER = np.int64(2**62)


@njit(cache=True, nogil=True)
def count_changed(old, new):
    """Number of elements whose bits differ."""
    changed = 0
    for i in range(old.size):
        changed += old[i] != new[i]
    return changed


@njit(cache=True, nogil=True)
def scan(old, new, sign, shift, mask, seen, last, classes, gaps, steps, at):
    """Append the changed elements of a tensor to `classes` u16, `gaps` u32, `steps`, from index `at`; returns the end.

    A gap is the distance, in ranks of the class, to the previous changed element of that class (>= 1).
    A step is the distance of the values in the ordered integers of the dtype.
    """
    for i in range(old.size):
        a = np.uint64(old[i])
        c = np.int64((a >> shift) & mask)
        seen[c] += 1
        if old[i] != new[i]:
            b = np.uint64(new[i])
            if sign:
                a = ~a if a & sign else a | sign
                b = ~b if b & sign else b | sign
            classes[at] = c
            gaps[at] = seen[c] - last[c]
            steps[at] = b - a
            last[c] = seen[c]
            at += 1
    return at


@njit(cache=True, nogil=True)
def group_by_class(classes, gaps, steps, cursor, out_gaps, out_steps):
    """Stable split by class: `cursor` int64 holds the start of every class and is advanced."""
    for i in range(classes.size):
        at = cursor[classes[i]]
        out_gaps[at] = gaps[i]
        out_steps[at] = steps[i]
        cursor[classes[i]] = at + 1


@njit(cache=True, nogil=True)
def locate(old, sign, shift, mask, seen, due, cursor, end, gaps, steps, indices, values):
    """Inverse of `scan` for one tensor: fill `indices` u32 and `values` with its changed elements.

    `due` int64 is the rank of the next changed element per class. Returns how many were found; more than
    `indices` holds means that the stream does not belong to `old`, and -1 is returned.
    """
    found = 0
    for i in range(old.size):
        a = np.uint64(old[i])
        c = np.int64((a >> shift) & mask)
        seen[c] += 1
        if seen[c] == due[c]:
            if found == indices.size:
                return -1
            step = np.uint64(steps[cursor[c]])
            if sign:
                b = (~a if a & sign else a | sign) + step
                # Undo the order map on the low bits of the width: its sign bit is inverted there.
                values[found] = b ^ sign if b & sign else ~b
            else:
                values[found] = a + step
            indices[found] = i
            found += 1
            cursor[c] += 1
            if cursor[c] < end[c]:
                due[c] += np.int64(gaps[cursor[c]])
            else:
                due[c] = NEVER
    return found


@njit(cache=True, nogil=True)
def scatter(target, indices, values):
    """target[indices] = values."""
    for i in range(indices.size):
        target[indices[i]] = values[i]
