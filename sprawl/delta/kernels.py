"""Compiled inner loops of the codec. All take unsigned integer views and work modulo 2**width: never float addition.

Conventions: `old`, `new` uint8/16/32/64 [n]. `form` is uint64 [5]: sign, shift, mask, base and full of
`sprawl.delta.bits.Bits`; `class_of` uint16 [keys] and `starts` uint64 [slots + 1] are a `Partition`. Ranks count the
elements of a class, over all pieces of a segment in order. `low` and `width` (a multiple of four) name the window of
classes that are counted by vector compares, 64 elements at a time; the few elements outside it are counted one by one.
The window changes speed, never the result.
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
_BLOCK = np.uint64(LANES)


def _in_byte() -> np.ndarray:
    """Position of the one of rank r in byte b, uint8 [8, 256]; 0 where there is none."""
    table = np.zeros((8, 256), np.uint8)
    for byte in range(256):
        ones = [bit for bit in range(8) if byte >> bit & 1]
        table[: len(ones), byte] = ones
    return table


_IN_BYTE = _in_byte()


@njit(nogil=True, inline="always")
def _ordered(bits, sign, full):
    """Order map: sign-magnitude to unsigned integers in the order of the values."""
    if sign:
        return ~bits & full if bits & sign else bits | sign
    return bits


@njit(nogil=True, inline="always")
def _restored(ordered, sign, full):
    if sign:
        return (ordered ^ sign if ordered & sign else ~ordered) & full
    return ordered & full


@njit(cache=True, nogil=True)
def count_changed(old, new):
    """Number of elements whose bits differ."""
    changed = 0
    whole = old.size // LANES * LANES
    every = old.dtype.type(_ALL)
    for i in range(np.uint64(0), np.uint64(whole), _BLOCK):
        changed += popcount(differ(old, new, i, every))
    for i in range(whole, old.size):
        changed += old[i] != new[i]
    return changed


@njit(cache=True, nogil=True)
def count_keys(old, new, form, counts, changed):
    """Add the elements of `old` to `counts` int64 [keys] by key, and those that differ in `new` to `changed`."""
    field = form[4] << form[3]
    for i in range(old.size):
        a = np.uint64(old[i])
        key = (a >> (form[1] + form[3])) & form[2]
        counts[key] += 1
        changed[key] += ((a ^ np.uint64(new[i])) & field) != np.uint64(0)


@njit(nogil=True)
def _window(old, form, starts, low, width):
    """The mask that keeps an element's key, and the smallest key bits of each class of the window."""
    edges = np.empty(width + 1, old.dtype)
    for k in range(width + 1):
        edges[k] = starts[low + k] << (form[1] + form[3])
    return old.dtype.type(form[2] << (form[1] + form[3])), edges


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
def _count(array, block, keep, edges, k, reached, passed):
    """Who is at or above each of four edges of the window, from the one after k on: masks and running counts."""
    one, two, three, four = reach_four(
        array, block, keep, edges[k + _ONE], edges[k + _TWO], edges[k + _THREE], edges[k + _FOUR]
    )
    reached[k + _ONE], reached[k + _TWO], reached[k + _THREE], reached[k + _FOUR] = one, two, three, four
    passed[k + _ONE] += popcount(one)
    passed[k + _TWO] += popcount(two)
    passed[k + _THREE] += popcount(three)
    passed[k + _FOUR] += popcount(four)


@njit(cache=True, nogil=True)
def scan(old, new, form, class_of, starts, low, width, seen, last, tally, classes, gaps, steps, at):
    """Append the changed elements of a piece to `classes` u16, `gaps` u32, `steps`, from index `at`; returns the end.

    `seen` int64 [slots] counts elements met so far, `last` is the rank of the last changed one and `tally` the number
    of changed ones. A gap is the distance, in ranks of the class, to the previous changed element of that class
    (>= 1); a step the distance of the values in the ordered integers of the dtype. Within a class, elements come in
    order.
    """
    sign, shift, mask, base, full = form[0], form[1], form[2], form[3], form[4]
    keep, edges = _window(old, form, starts, low, width)
    field = old.dtype.type(full << base)
    reached, passed = np.zeros(MAX_WINDOW + 1, np.uint64), np.zeros(MAX_WINDOW + 1, np.int64)
    first, wide, at = np.uint64(low), np.uint64(width), np.uint64(at)
    for part in range(2):
        a_part, b_part, size = _part(old, part), _part(new, part), _blocks(old.size, part)
        valid = _ALL if part == 0 else (_ONE << np.uint64(old.size % LANES)) - _ONE
        for block in range(np.uint64(0), size, _BLOCK):
            change = differ(a_part, b_part, block, field)
            inside = reach(a_part, block, keep, edges[0]) & valid
            reached[0] = inside
            passed[0] += popcount(inside)
            for k in range(np.uint64(0), wide, _FOUR):
                _count(a_part, block, keep, edges, k, reached, passed)
            outside = (~inside | reached[wide]) & valid
            while outside:
                lane = lowest(outside)
                outside &= outside - _ONE
                a = (np.uint64(a_part[block + lane]) >> base) & full
                c = np.uint64(class_of[(a >> shift) & mask])
                seen[c] += 1
                if (change >> lane) & _ONE:
                    b = (np.uint64(b_part[block + lane]) >> base) & full
                    change ^= _ONE << lane
                    classes[at] = c
                    gaps[at] = seen[c] - last[c]
                    steps[at] = _ordered(b, sign, full) - _ordered(a, sign, full)
                    last[c] = seen[c]
                    tally[c] += 1
                    at += _ONE
            while change:
                lane = lowest(change)
                change &= change - _ONE
                a = (np.uint64(a_part[block + lane]) >> base) & full
                b = (np.uint64(b_part[block + lane]) >> base) & full
                c = np.uint64(class_of[(a >> shift) & mask])
                k = c - first
                # The counts are already past this block: take back the members of the class behind this one.
                behind = popcount(((reached[k] & ~reached[k + _ONE]) >> lane) >> _ONE)
                rank = seen[c] + passed[k] - passed[k + _ONE] - behind
                classes[at] = c
                gaps[at] = rank - last[c]
                steps[at] = _ordered(b, sign, full) - _ordered(a, sign, full)
                last[c] = rank
                tally[c] += 1
                at += _ONE
    for k in range(wide):
        seen[first + k] += passed[k] - passed[k + _ONE]
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
def locate(old, form, class_of, starts, low, width, due, cursor, end, gaps, steps, offset, indices, values):
    """Inverse of `scan` for one piece: fill `indices` u32 (counted from `offset`) and `values`, both ascending.

    Per class: `due` int64 is how many elements to pass before the next changed one, `cursor` and `end` uint64 where
    its gaps and steps are. Values are those of the field (`full` bits, not shifted to their base). Returns how many
    were found, -1 when `indices` is too short for them (another base).
    """
    sign, shift, mask, base, full = form[0], form[1], form[2], form[3], form[4]
    keep, edges = _window(old, form, starts, low, width)
    reached, passed = np.zeros(MAX_WINDOW + 1, np.uint64), np.zeros(MAX_WINDOW + 1, np.int64)
    found_steps, targets = np.zeros(LANES, steps.dtype), np.zeros(MAX_WINDOW, np.int64)
    targets[:width] = due[low : low + width]
    first, wide, found = np.uint64(low), np.uint64(width), np.uint64(0)
    for part in range(2):
        a_part, size = _part(old, part), _blocks(old.size, part)
        start = np.uint64(offset if part == 0 else offset + old.size // LANES * LANES)
        valid = _ALL if part == 0 else (_ONE << np.uint64(old.size % LANES)) - _ONE
        for block in range(np.uint64(0), size, _BLOCK):
            change = np.uint64(0)
            inside = reach(a_part, block, keep, edges[0]) & valid
            reached[0] = inside
            passed[0] += popcount(inside)
            hits = np.uint64(0)  # classes of the window whose next changed element is in this block
            for k in range(np.uint64(0), wide, _FOUR):
                _count(a_part, block, keep, edges, k, reached, passed)
                for j in range(k, k + _FOUR):
                    hits |= (np.uint64(targets[j] + passed[j + _ONE] - passed[j]) >> np.uint64(63)) << j
            while hits:
                k = lowest(hits)
                hits &= hits - _ONE
                members = reached[k] & ~reached[k + _ONE]
                until = passed[k] - passed[k + _ONE]
                before = until - popcount(members)
                target, at, stop = targets[k], cursor[first + k], end[first + k]
                while target < until:
                    lane = _select(members, np.uint64(target - before))
                    found_steps[lane] = steps[at]
                    change |= _ONE << lane
                    at += _ONE
                    target += np.int64(gaps[at]) if at < stop else NEVER
                cursor[first + k] = at
                targets[k] = target
            outside = (~inside | reached[wide]) & valid
            while outside:
                lane = lowest(outside)
                outside &= outside - _ONE
                c = np.uint64(class_of[(np.uint64(a_part[block + lane]) >> (shift + base)) & mask])
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
                a = (np.uint64(a_part[block + lane]) >> base) & full
                indices[found] = start + block + lane
                values[found] = _restored(_ordered(a, sign, full) + np.uint64(found_steps[lane]), sign, full)
                found += _ONE
    for k in range(wide):
        due[first + k] = targets[k] - (passed[k] - passed[k + _ONE])
    return np.int64(found)


@njit(cache=True, nogil=True)
def merge_halves(octets, offset, low_at, low, high_at, high, indices, values):
    """Patch of `octets` (whose first is number `offset`) from those of its low and its high nibbles, all ascending.

    Returns how many were written to `indices` and `values`.
    """
    i = j = found = 0
    while i < low_at.size or j < high_at.size:
        if j == high_at.size or (i < low_at.size and low_at[i] <= high_at[j]):
            at = np.int64(low_at[i])
        else:
            at = np.int64(high_at[j])
        octet = octets[at - offset]
        if i < low_at.size and low_at[i] == at:
            octet = (octet & np.uint8(0xF0)) | low[i]
            i += 1
        if j < high_at.size and high_at[j] == at:
            octet = (octet & np.uint8(0x0F)) | (high[j] << np.uint8(4))
            j += 1
        indices[found], values[found] = at, octet
        found += 1
    return found


@njit(cache=True, nogil=True)
def octets_to_words(words, octets_at, octets, indices, values):
    """Patch of `words` from one of their bytes (little-endian). Returns how many were written."""
    size = np.int64(words.itemsize)
    found = -1
    last = np.int64(-1)
    for i in range(octets.size):
        at = np.int64(octets_at[i]) // size
        if at != last:
            found += 1
            last = at
            indices[found], values[found] = at, words[at]
        place = np.uint64(8 * (np.int64(octets_at[i]) % size))
        values[found] = (np.uint64(values[found]) & ~(np.uint64(255) << place)) | (np.uint64(octets[i]) << place)
    return found + 1


@njit(cache=True, nogil=True)
def scatter(target, indices, values):
    """target[indices] = values."""
    for i in range(indices.size):
        target[indices[i]] = values[i]
