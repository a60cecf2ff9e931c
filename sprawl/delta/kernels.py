"""Compiled inner loops of the codec. All take unsigned integer views and work modulo 2**width: never float addition.

Conventions: `old`, `new` uint8/16/32/64 [n]. `form` is uint64 [3]: sign, shift and mask of `sprawl.delta.bits.Bits`;
the class of an element is `(old >> shift) & mask`. Ranks count the elements of a class, over all pieces of a segment
in order. `low` and `width` name the window of classes that are counted by vector compares, 64 elements at a time;
the few elements outside it are counted one by one. The window changes speed, never the result.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from sprawl.delta.simd import LANES, differ, lowest, popcount, reach, reach_four

NEVER = np.int64(2**62)
MAX_WINDOW = 16
_ONE = np.uint64(1)
_TWO, _THREE, _FOUR = np.uint64(2), np.uint64(3), np.uint64(4)
_ALL = np.uint64(2**64 - 1)
_PAIRS = np.uint64(0x5555555555555555)
_NIBBLES = np.uint64(0x3333333333333333)
_BYTES = np.uint64(0x0F0F0F0F0F0F0F0F)
_EVERY = np.uint64(0x0101010101010101)
_HIGH = np.uint64(0x8080808080808080)


def _in_byte() -> np.ndarray:
    """Position of the one of rank r in byte b, uint8 [8, 256]; 0 where there is none."""
    table = np.zeros((8, 256), np.uint8)
    for byte in range(256):
        ones = [bit for bit in range(8) if byte >> bit & 1]
        table[: len(ones), byte] = ones
    return table


_IN_BYTE = _in_byte()


@njit(nogil=True, inline="always")
def _ordered(bits, sign):
    """Order map: sign-magnitude to unsigned integers in the order of the values, on the low bits of the width."""
    if sign:
        return ~bits if bits & sign else bits | sign
    return bits


@njit(nogil=True, inline="always")
def _restored(ordered, sign):
    if sign:
        return ordered ^ sign if ordered & sign else ~ordered
    return ordered


@njit(cache=True, nogil=True)
def count_changed(old, new):
    """Number of elements whose bits differ."""
    changed = 0
    whole = old.size // LANES * LANES
    for i in range(np.uint64(0), np.uint64(whole), np.uint64(LANES)):
        changed += popcount(differ(old, new, i))
    for i in range(whole, old.size):
        changed += old[i] != new[i]
    return changed


@njit(cache=True, nogil=True)
def count_classes(old, form, counts):
    """Add the elements of `old` to `counts` int64 [classes], by class."""
    for i in range(old.size):
        counts[np.int64((np.uint64(old[i]) >> form[1]) & form[2])] += 1


@njit(nogil=True)
def _window(old, form, low, width):
    """The mask that keeps an element's class bits, and the smallest class bits of each class of the window."""
    edges = np.empty(width + 1, old.dtype)
    for k in range(width + 1):
        edges[k] = np.uint64(low + k) << form[1]
    return old.dtype.type(form[2] << form[1]), edges


@njit(nogil=True)
def _part(array, part):
    """Part 0 is the array itself; part 1 its last elements that fill no block, in a block of their own."""
    if part == 0:
        return array
    tail = np.zeros(LANES, array.dtype)
    rest = array.size % LANES
    tail[:rest] = array[array.size - rest :]
    return tail


@njit(nogil=True)
def _blocks(size, part):
    """Elements in the whole blocks of a part."""
    if part == 0:
        return np.uint64(size // LANES * LANES)
    return np.uint64(LANES if size % LANES else 0)


@njit(nogil=True, inline="always")
def _split(array, block, keep, edges, k, above, masks):
    """The members of four classes of the window, from k on, into `masks`; returns who is above them."""
    one, two, three, four = reach_four(
        array, block, keep, edges[k + _ONE], edges[k + _TWO], edges[k + _THREE], edges[k + _FOUR]
    )
    masks[k] = above & ~one
    masks[k + _ONE] = one & ~two
    masks[k + _TWO] = two & ~three
    masks[k + _THREE] = three & ~four
    return four


@njit(cache=True, nogil=True)
def scan(old, new, form, low, width, seen, last, tally, classes, gaps, steps, at):
    """Append the changed elements of a piece to `classes` u16, `gaps` u32, `steps`, from index `at`; returns the end.

    `seen` int64 [classes] counts elements met so far, `last` is the rank of the last changed one and `tally` the number
    of changed ones. A gap is the distance, in ranks of the class, to the previous changed element of that class
    (>= 1); a step the distance of the values in the ordered integers of the dtype. Within a class, elements come in
    order.
    """
    sign, shift, mask = form[0], form[1], form[2]
    keep, edges = _window(old, form, low, width)
    masks = np.zeros(MAX_WINDOW, np.uint64)
    first, wide, at = np.uint64(low), np.uint64(width), np.uint64(at)
    for part in range(2):
        a_part, b_part, size = _part(old, part), _part(new, part), _blocks(old.size, part)
        valid = _ALL if part == 0 else (_ONE << np.uint64(old.size % LANES)) - _ONE
        for block in range(np.uint64(0), size, np.uint64(LANES)):
            change = differ(a_part, b_part, block)
            above = reach(a_part, block, keep, edges[0]) & valid
            outside = ~above & valid
            for k in range(np.uint64(0), wide, _FOUR):
                above = _split(a_part, block, keep, edges, k, above, masks)
                seen[first + k] += popcount(masks[k])
                seen[first + k + _ONE] += popcount(masks[k + _ONE])
                seen[first + k + _TWO] += popcount(masks[k + _TWO])
                seen[first + k + _THREE] += popcount(masks[k + _THREE])
            outside |= above & valid
            while outside:
                lane = lowest(outside)
                outside &= outside - _ONE
                a = np.uint64(a_part[block + lane])
                c = (a >> shift) & mask
                seen[c] += 1
                if (change >> lane) & _ONE:
                    change ^= _ONE << lane
                    classes[at] = c
                    gaps[at] = seen[c] - last[c]
                    steps[at] = _ordered(np.uint64(b_part[block + lane]), sign) - _ordered(a, sign)
                    last[c] = seen[c]
                    tally[c] += 1
                    at += _ONE
            while change:
                lane = lowest(change)
                change &= change - _ONE
                a = np.uint64(a_part[block + lane])
                c = (a >> shift) & mask
                # `seen` is already past this block: take back the members of the class behind this one.
                rank = seen[c] - popcount((masks[c - first] >> lane) >> _ONE)
                classes[at] = c
                gaps[at] = rank - last[c]
                steps[at] = _ordered(np.uint64(b_part[block + lane]), sign) - _ordered(a, sign)
                last[c] = rank
                tally[c] += 1
                at += _ONE
    return np.int64(at)


@njit(cache=True, nogil=True)
def group_by_class(classes, gaps, steps, passed, carry, cursor, out_gaps, out_steps):
    """Append one unit's changes to a segment's streams, which are split by class; stable.

    `cursor` int64 [classes] is where each class goes on and is advanced. `carry` int64 [classes] is how many elements
    of the class lie behind its last changed one (the unit's first gap grows by it), `passed` that number within the
    unit.
    """
    for i in range(classes.size):
        c = classes[i]
        at = cursor[c]
        out_gaps[at] = gaps[i] + carry[c]
        out_steps[at] = steps[i]
        carry[c] = 0
        cursor[c] = at + 1
    for c in range(passed.size):
        carry[c] += passed[c]


@njit(nogil=True, inline="always")
def _select(mask, rank):
    """Position of the one with `rank` ones below it; `mask` has more than `rank`. No branches: ranks are random."""
    sums = mask - ((mask >> _ONE) & _PAIRS)
    sums = (sums & _NIBBLES) + ((sums >> _TWO) & _NIBBLES)
    sums = ((sums + (sums >> _FOUR)) & _BYTES) * _EVERY  # byte k: ones in bytes 0 to k
    below = (((rank * _EVERY) | _HIGH) - sums) & _HIGH
    shift = np.uint64(popcount(below)) << _THREE
    left = rank - (((sums << np.uint64(8)) >> shift) & np.uint64(255))
    return shift + np.uint64(_IN_BYTE[left, (mask >> shift) & np.uint64(255)])


@njit(cache=True, nogil=True)
def locate(old, form, low, width, due, cursor, end, gaps, steps, offset, indices, values):
    """Inverse of `scan` for one piece: fill `indices` u32 (counted from `offset`) and `values`, both ascending.

    Per class: `due` int64 is how many elements to pass before the next changed one, `cursor` and `end` uint64 where
    its gaps and steps are. Returns how many were found, -1 when `indices` is too short for them (another base).
    """
    sign, shift, mask = form[0], form[1], form[2]
    keep, edges = _window(old, form, low, width)
    found_steps, masks = np.zeros(LANES, steps.dtype), np.zeros(MAX_WINDOW, np.uint64)
    first, wide, found = np.uint64(low), np.uint64(width), np.uint64(0)
    for part in range(2):
        a_part, size = _part(old, part), _blocks(old.size, part)
        start = np.uint64(offset if part == 0 else offset + old.size // LANES * LANES)
        valid = _ALL if part == 0 else (_ONE << np.uint64(old.size % LANES)) - _ONE
        for block in range(np.uint64(0), size, np.uint64(LANES)):
            change = np.uint64(0)
            above = reach(a_part, block, keep, edges[0]) & valid
            outside = ~above & valid
            hits = np.uint64(0)  # classes of the window whose next changed element is in this block
            for k in range(np.uint64(0), wide, _FOUR):
                above = _split(a_part, block, keep, edges, k, above, masks)
                for j in range(k, k + _FOUR):
                    ahead = due[first + j] - popcount(masks[j])
                    due[first + j] = ahead
                    hits |= (np.uint64(ahead) >> np.uint64(63)) << j
            while hits:
                k = lowest(hits)
                hits &= hits - _ONE
                c = first + k
                inside = masks[k]
                count = popcount(inside)
                wanted = due[c] + count
                at = cursor[c]
                while wanted < count:
                    lane = _select(inside, np.uint64(wanted))
                    found_steps[lane] = steps[at]
                    change |= _ONE << lane
                    at += _ONE
                    wanted += np.int64(gaps[at]) if at < end[c] else NEVER
                cursor[c] = at
                due[c] = wanted - count
            outside |= above & valid
            while outside:
                lane = lowest(outside)
                outside &= outside - _ONE
                c = (np.uint64(a_part[block + lane]) >> shift) & mask
                if due[c] == 0:
                    at = cursor[c]
                    found_steps[lane] = steps[at]
                    change |= _ONE << lane
                    cursor[c] = at + _ONE
                    due[c] = np.int64(gaps[at + _ONE]) if at + _ONE < end[c] else NEVER
                due[c] -= 1
            while change:
                lane = lowest(change)
                change &= change - _ONE
                if found == np.uint64(indices.size):
                    return -1
                ordered = _ordered(np.uint64(a_part[block + lane]), sign) + np.uint64(found_steps[lane])
                indices[found] = start + block + lane
                values[found] = _restored(ordered, sign)
                found += _ONE
    return np.int64(found)


@njit(cache=True, nogil=True)
def unpack_nibbles(words, out):
    """Four-bit codes of unsigned `words` [n], lowest first, into `out` uint8 [n * 2 * itemsize]."""
    per = out.size // words.size
    for i in range(words.size):
        word = np.uint64(words[i])
        for k in range(per):
            out[i * per + k] = (word >> np.uint64(4 * k)) & np.uint64(15)


@njit(cache=True, nogil=True)
def fold_nibbles(words, start, codes_at, codes, indices, values):
    """Patch of `words` (whose first is element `start` of its tensor) that sets code `codes_at[k]` to `codes[k]`.

    `codes_at` ascends and counts codes from the first of `words`. Returns the number of words written to `indices`
    and `values`.
    """
    per = np.int64(2 * words.itemsize)
    found = -1
    last = np.int64(-1)
    for k in range(codes.size):
        at = np.int64(codes_at[k]) // per
        if at != last:
            found += 1
            last = at
            indices[found] = start + at
            values[found] = words[at]
        place = np.uint64(4 * (np.int64(codes_at[k]) % per))
        kept = np.uint64(values[found]) & ~(np.uint64(15) << place)
        values[found] = kept | ((np.uint64(codes[k]) & np.uint64(15)) << place)
    return found + 1


@njit(cache=True, nogil=True)
def scatter(target, indices, values):
    """target[indices] = values."""
    for i in range(indices.size):
        target[indices[i]] = values[i]
