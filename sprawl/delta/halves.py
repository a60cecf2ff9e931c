"""Patches of words that hold several codes, from the patches of those codes."""

from __future__ import annotations

import numpy as np
from numba import njit


def in_order(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A patch of bytes, ascending: `indices` u32 and `values` u8."""
    both = (indices.astype(np.uint64) << np.uint64(8)) | values
    both.sort()
    return (both >> np.uint64(8)).astype(np.uint32), both.astype(np.uint8)


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
