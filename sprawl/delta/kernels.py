"""Compiled inner loops of the codec. All take unsigned integer views and work modulo 2**width: never float addition.

Conventions: `old`, `new` uint8/16/32/64 [n]. `form` is uint64 [5]: sign, shift, mask, base and full of
`sprawl.delta.bits.Bits`; `class_of` uint16 [keys] and `starts` uint64 [slots + 1] are a `Partition`. Ranks count the
elements of a class, over all pieces of a segment in order.

Elements are surveyed a tile (64 blocks of 64) at a time, without branches: which of them are of which class, and how
many of the class come before each block. What is done per changed element looks its rank, or its place, up in there.
Classes that hold many elements are a *window* of neighbours, the few elements outside it are counted one by one. The
window changes speed, never the result.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from sprawl.delta.simd import LANES, at_least, differ, lowest, nth_one, popcount, prefetch, prefetch_line
from sprawl.delta.survey import BLOCKS, REACH, survey_8, survey_16

NEVER = np.int64(2**62)
MISSED = 200  # a window of eight classes will do when it misses less than one in so many elements
EIGHT = 8  # classes that are surveyed together
MARGIN = 16  # the most classes in a window
_FAR = np.uint64(REACH)
_RUNS, _RUN = 32, 64  # of elements looked at to find the window
_TILE = BLOCKS * LANES  # elements
_ZERO, _ONE = np.uint64(0), np.uint64(1)
_ALL = np.uint64(2**64 - 1)
_BLOCK = np.uint64(LANES)
_HALVES = tuple(np.uint64(half) for half in (32, 16, 8, 4, 2))
_BLOCKS = np.uint64(BLOCKS)
_AHEAD = np.uint64(32)
_LAST = np.uint64(BLOCKS - 1)


@njit(nogil=True, inline="always")
def _ordered(bits, sign, full):
    """Order map: sign-magnitude to unsigned integers in the order of the values. No branches: signs are random."""
    return bits ^ (sign | (full & (_ZERO - np.uint64(bits & sign != _ZERO))))


@njit(nogil=True, inline="always")
def _restored(ordered, sign, full):
    ordered &= full
    return ordered ^ (sign | (full & (_ZERO - np.uint64(ordered & sign != sign))))


@njit(cache=True, nogil=True)
def count_changed(old, new):
    """Number of elements whose bits differ."""
    changed = 0
    whole = old.size // LANES * LANES
    every = old.dtype.type(_ALL)
    for i in range(_ZERO, np.uint64(whole), _BLOCK):
        changed += popcount(differ(old, new, i, every))
    for i in range(whole, old.size):
        changed += old[i] != new[i]
    return changed


@njit(cache=True, nogil=True)
def sample_changes(old, new, runs, length):
    """How many of some elements differ, and how many were looked at: evenly spread runs, or all where those overlap."""
    changed = seen = 0
    for start in range(0, old.size, max(length, old.size // runs)):
        for i in range(start, min(old.size, start + length)):
            changed += old[i] != new[i]
            seen += 1
    return changed, seen


@njit(cache=True, nogil=True)
def count_keys(old, new, runs, length, form, counts, changed):
    """Count elements, those of `sample_changes`, by key in `counts` int64 [keys], and in `changed` if they differ."""
    field = form[4] << form[3]
    for start in range(0, old.size, max(length, old.size // runs)):
        for i in range(start, min(old.size, start + length)):
            a = np.uint64(old[i])
            key = (a >> (form[1] + form[3])) & form[2]
            counts[key] += 1
            changed[key] += ((a ^ np.uint64(new[i])) & field) != _ZERO


@njit(nogil=True)
def _window(old, form, class_of, starts, slots):
    """The classes that vectors are spent on, from a sample: first class, number of them (8 or 16), and their tables.

    Returned are the first class, `low` (its first key), and `hot` and `edges` of `survey_of`.
    """
    counts, seen = np.zeros(slots, np.int64), 0
    for start in range(0, old.size, max(_RUN, old.size // _RUNS)):
        for i in range(start, min(old.size, start + _RUN)):
            counts[class_of[(np.uint64(old[i]) >> (form[1] + form[3])) & form[2]]] += 1
            seen += 1
    first = most = eights = 0
    while eights * EIGHT < MARGIN and (seen - most) * MISSED > seen:
        eights += 1
        for c in range(slots - MARGIN):
            inside = 0
            for k in range(EIGHT * eights):
                inside += counts[c + k]
            if inside > most:
                first, most = c, inside
    low, end = starts[first], _ZERO
    hot, edges = np.zeros((eights, REACH + 1), np.uint8), np.zeros((eights, EIGHT + 1), np.uint8)
    for k in range(eights * EIGHT):
        begin, end = end, starts[first + k + 1] - low
        if end > _FAR:  # a class is in the window with all its keys or not at all
            end = begin
        for key in range(begin, end):
            hot[k // EIGHT, key] = 1 << (k % EIGHT)
        edges[k // EIGHT, k % EIGHT], edges[k // EIGHT, k % EIGHT + 1] = begin, end
    return np.uint64(first), low, hot, edges


@njit(nogil=True)
def _tail(array):
    """The last elements, which fill no tile, in one of their own."""
    tail = np.zeros(_TILE, array.dtype)
    rest = array.size % _TILE
    for i in range(rest):
        tail[i] = array[array.size - rest + i]
    return tail


@njit(nogil=True)
def _tables(width):
    """`members`, `before` and `totals` of `survey_of`; aligned to cache lines, because they are written as vectors."""
    room = np.empty((BLOCKS + BLOCKS // 4 + 1) * width + LANES // 8, np.uint64)
    start = (-room.ctypes.data % LANES) // 8
    middle, end = start + BLOCKS * width, start + (BLOCKS + BLOCKS // 4) * width
    return room[start:middle], room[middle:end].view(np.uint16), room[end : end + width].view(np.int64)


@njit(nogil=True)
def _survey(array, start, size, form, low, hot, edges, members, before, totals, outside):
    """`survey_of` for a tile of which the first `size` elements are valid."""
    shift, mask = form[1] + form[3], form[2]
    if len(hot) == 1:
        survey_8(array, start, shift, mask, low, hot, edges, members, before, totals, outside)
    else:
        survey_16(array, start, shift, mask, low, hot, edges, members, before, totals, outside)
    if size < _TILE:
        last = size // LANES
        valid = (_ONE << np.uint64(size % LANES)) - _ONE
        for k in range(totals.size):
            totals[k] = before[k * BLOCKS + last] + popcount(members[last * totals.size + k] & valid)
        outside[last] &= valid
        for b in range(last + 1, BLOCKS):
            outside[b] = _ZERO


@njit(cache=True, nogil=True)
def scan(old, new, form, class_of, starts, seen, last, tally, classes, gaps, steps, at):
    """Append the changed elements of a piece to `classes` u16, `gaps` u32, `steps`, from index `at`; returns the end.

    `seen` int64 [slots] counts elements met so far, `last` is the rank of the last changed one and `tally` the number
    of changed ones. A gap is the distance, in ranks of the class, to the previous changed element of that class
    (>= 1); a step the distance of the values in the ordered integers of the dtype. Within a class, elements come in
    order.
    """
    sign, shift, mask, base, full = form[0], form[1], form[2], form[3], form[4]
    first, low, hot, edges = _window(old, form, class_of, starts, seen.size)
    members, before, totals = _tables(len(hot) * EIGHT)
    outside, change = np.empty(BLOCKS, np.uint64), np.empty(BLOCKS, np.uint64)
    field = old.dtype.type(full << base)
    width, at = np.uint64(totals.size), np.uint64(at)
    for tile in range(0, old.size, _TILE):
        size = min(_TILE, old.size - tile)
        whole = size == _TILE
        a_tile, b_tile = (old, new) if whole else (_tail(old), _tail(new))
        start = np.uint64(tile if whole else 0)
        _survey(a_tile, start, size, form, low, hot, edges, members, before, totals, outside)
        for b in range(_BLOCKS):
            change[b] = differ(a_tile, b_tile, start + b * _BLOCK, field)
            prefetch(b_tile, start + (b + _BLOCKS) * _BLOCK)
        busy = at_least(change, _ZERO, _ONE) | at_least(outside, _ZERO, _ONE)
        while busy:
            b = lowest(busy)
            busy &= busy - _ONE
            ones, others, origin = change[b], outside[b], start + b * _BLOCK
            while others:
                lane = lowest(others)
                others &= others - _ONE
                a = (np.uint64(a_tile[origin + lane]) >> base) & full
                c = np.uint64(class_of[(a >> shift) & mask])
                seen[c] += 1
                if (ones >> lane) & _ONE:
                    ones ^= _ONE << lane
                    value = (np.uint64(b_tile[origin + lane]) >> base) & full
                    classes[at], gaps[at] = c, seen[c] - last[c]
                    steps[at] = _ordered(value, sign, full) - _ordered(a, sign, full)
                    last[c] = seen[c]
                    tally[c] += 1
                    at += _ONE
            while ones:
                lane = lowest(ones)
                a = (np.uint64(a_tile[origin + lane]) >> base) & full
                value = (np.uint64(b_tile[origin + lane]) >> base) & full
                c = np.uint64(class_of[(a >> shift) & mask])
                k = c - first
                ahead = popcount(members[b * width + k] & (ones ^ (ones - _ONE)))
                rank = seen[c] + np.int64(before[k * _BLOCKS + b]) + ahead
                ones &= ones - _ONE
                classes[at], gaps[at] = c, rank - last[c]
                steps[at] = _ordered(value, sign, full) - _ordered(a, sign, full)
                last[c] = rank
                tally[c] += 1
                at += _ONE
        for k in range(width):
            seen[first + k] += totals[k]
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
def _moved(word, step, sign, base, full):
    """The new value of an element with the old `word`."""
    return _restored(_ordered((np.uint64(word) >> base) & full, sign, full) + np.uint64(step), sign, full)


@njit(nogil=True)
def _locate_window(
    tile, start, first, members, before, totals, due, cursor, end, gaps, steps, form, origin, indices, values, found
):
    """The changed elements of a tile that are in the window: see `locate`. Returns the number found, or -1."""
    sign, base, full = form[0], form[3], form[4]
    width, room = np.uint64(totals.size), np.uint64(indices.size)
    for k in range(width):
        c, row, until = first + k, k * _BLOCKS, totals[k]
        target = due[c]
        if target < until:
            at, stop = cursor[c], end[c]
            while target < until:
                # The last block with at most `target` members before it. No branches: ranks are random.
                b = _LAST - np.uint64(popcount(at_least(before, row, np.uint16(target + 1))))
                lane = nth_one(members[b * width + k], np.uint64(target - np.int64(before[row + b])))
                if found == room:
                    return np.int64(-1)
                place = start + b * _BLOCK + lane
                indices[found] = origin + place
                values[found] = _moved(tile[place], steps[at], sign, base, full)
                found += _ONE
                at += _ONE
                prefetch_line(gaps, at + _AHEAD)  # a stream a class: too many for the processor to foresee
                prefetch_line(steps, at + _AHEAD)
                target += np.int64(gaps[at]) if at < stop else NEVER
            cursor[c] = at
        due[c] = target - until
    return np.int64(found)


@njit(cache=True, nogil=True)
def locate(old, form, class_of, starts, due, cursor, end, gaps, steps, offset, indices, values):
    """Inverse of `scan` for one piece: fill `indices` u32 (each once, counted from `offset`) and `values`.

    Per class: `due` int64 is how many elements to pass before the next changed one, `cursor` and `end` uint64 where
    its gaps and steps are. Values are those of the field (`full` bits, not shifted to their base). Returns how many
    were found, -1 when there are more than fit (another base).
    """
    sign, shift, mask, base, full = form[0], form[1], form[2], form[3], form[4]
    first, low, hot, edges = _window(old, form, class_of, starts, due.size)
    members, before, totals = _tables(len(hot) * EIGHT)
    outside = np.empty(BLOCKS, np.uint64)
    found = np.uint64(0)
    for begin in range(0, old.size, _TILE):
        size = min(_TILE, old.size - begin)
        whole = size == _TILE
        tile = old if whole else _tail(old)
        start, origin = np.uint64(begin if whole else 0), np.uint64(offset if whole else offset + begin)
        _survey(tile, start, size, form, low, hot, edges, members, before, totals, outside)
        located = _locate_window(
            tile, start, first, members, before, totals, due, cursor, end, gaps, steps, form, origin,
            indices, values, found,
        )  # fmt: skip
        if located < 0:
            return located
        found = np.uint64(located)
        busy = at_least(outside, _ZERO, _ONE)
        while busy:
            b = lowest(busy)
            busy &= busy - _ONE
            others = outside[b]
            while others:
                place = start + b * _BLOCK + lowest(others)
                others &= others - _ONE
                c = np.uint64(class_of[(np.uint64(tile[place]) >> (shift + base)) & mask])
                if due[c] == 0:
                    if found == np.uint64(indices.size):
                        return -1
                    at = cursor[c]
                    indices[found], values[found] = origin + place, _moved(tile[place], steps[at], sign, base, full)
                    found += _ONE
                    cursor[c] = at + _ONE
                    due[c] = np.int64(gaps[at + _ONE]) if at + _ONE < end[c] else NEVER
                due[c] -= 1
    return np.int64(found)


@njit(cache=True, nogil=True)
def scatter(target, indices, values):
    """target[indices] = values."""
    for i in range(indices.size):
        target[indices[i]] = values[i]
