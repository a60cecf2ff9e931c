"""Frequency tables of the entropy coder: how probable each token is, and which classes share a table."""

from __future__ import annotations

import numpy as np
from numba import njit

SCALE_BITS = 12
SCALE = 1 << SCALE_BITS  # what the frequencies of a table add up to
TOKENS = 256
_NO_TABLE = 128  # values that are too few for a table of their own
_GROUP_BYTES = 24  # of a group besides its frequencies and words


@njit(cache=True, nogil=True)
def scale_counts(counts):
    """`counts` int64 [256] scaled to sum to 4096; what occurs keeps at least 1."""
    total = counts.sum()
    scaled = np.zeros(TOKENS, np.int64)
    for token in range(TOKENS):
        if counts[token]:
            scaled[token] = max(1, counts[token] * SCALE // total)
    missing = SCALE - scaled.sum()
    while missing:  # rounding: the most frequent ones pay or gain
        largest = scaled.argmax()
        share = max(missing, -(scaled[largest] // 2))
        scaled[largest] += share
        missing -= share
    return scaled


@njit(cache=True, nogil=True)
def push_table(frequencies):
    """What coding a token needs, uint64 [256, 5]: a division by its frequency as multiply and shift, exact for states.

    state' = state + bias + (state // f) * (4096 - f), as in F. Giesen's public-domain rans_byte.
    """
    table = np.zeros((TOKENS, 5), np.uint64)
    start = 0
    for token in range(TOKENS):
        frequency = frequencies[token]
        if frequency == 0:
            continue
        shift = 0
        while (1 << shift) < frequency:
            shift += 1
        if frequency == 1:  # the reciprocal does not fit: makes state - 1, which the bias repairs
            table[token, 0], table[token, 3] = (1 << 32) - 1, start + SCALE - 1
        else:
            table[token, 0], table[token, 3] = ((1 << (shift + 31)) + frequency - 1) // frequency, start
            table[token, 1] = shift - 1
        table[token, 2] = SCALE - frequency
        table[token, 4] = frequency << 19
        start += frequency
    return table


@njit(cache=True, nogil=True)
def slot_table(frequencies):
    """What each of the 4096 slots means, uint32: token, offset in its range << 8, its frequency - 1 << 20."""
    slots = np.zeros(SCALE, np.uint32)
    at = 0
    for token in range(TOKENS):
        for offset in range(int(frequencies[token])):
            slots[at] = token | (offset << 8) | ((frequencies[token] - 1) << 20)
            at += 1
    return slots


@njit(cache=True, nogil=True)
def _cost(counts):
    """Bits that a group with these token counts int64 [256] takes, its table included."""
    total = counts.sum()
    bits = 8.0 * _GROUP_BYTES
    for token in range(TOKENS):
        if counts[token]:
            bits += counts[token] * np.log2(total / counts[token]) + 10.4
    return bits


@njit(cache=True, nogil=True)
def group_classes(tables):
    """How many neighbouring classes share each table: int64 [groups]. Pairs are joined as long as that saves bytes.

    `tables` int64 [classes, 256] holds token counts; its first rows become those of the groups.
    """
    sizes, groups = np.ones(len(tables), np.int64), 1
    for class_ in range(1, len(tables)):
        if tables[groups - 1].sum() < _NO_TABLE:
            tables[groups - 1] += tables[class_]
            sizes[groups - 1] += 1
        else:
            tables[groups] = tables[class_]
            groups += 1
    alone, gains = np.zeros(groups), np.full(groups, -np.inf)
    for k in range(groups):
        alone[k] = _cost(tables[k])
    for k in range(groups - 1):
        gains[k] = alone[k] + alone[k + 1] - _cost(tables[k] + tables[k + 1])
    while groups > 1:
        at = gains[: groups - 1].argmax()
        if gains[at] <= 0:
            break
        tables[at] += tables[at + 1]
        sizes[at] += sizes[at + 1]
        alone[at] = _cost(tables[at])
        for k in range(at + 1, groups - 1):
            tables[k], sizes[k], alone[k], gains[k] = tables[k + 1], sizes[k + 1], alone[k + 1], gains[k + 1]
        groups -= 1
        for k in range(max(0, int(at) - 1), min(int(at) + 1, groups - 1)):
            gains[k] = alone[k] + alone[k + 1] - _cost(tables[k] + tables[k + 1])
    return sizes[:groups]
