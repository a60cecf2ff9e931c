"""Entropy coder of the delta streams: unsigned integers as tokens (range ANS) and raw low bits.

A value below 16 is its own token; above, the token holds its size in bits and its next two bits (a quarter octave),
and what is left of it goes out as raw bits, because within a quarter octave gaps are spread almost evenly. Tokens are
coded by range ANS (J. Duda, arXiv 1311.2540): 12-bit frequencies, four interleaved 32-bit states, 16-bit words.

A coded stream:

    u8 lowest token | u8 number of tokens - 1 | frequency of each, LEB128 | 4 x u32 states | u32 words | u16 words
    | raw bits, first value lowest, in whole bytes

The coder is compiled, releases the interpreter lock and costs about half of what pcodec does for these streams, with
tables a third the size.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from sprawl.delta.scratch import scratch
from sprawl.delta.simd import highest
from sprawl.errors import IntegrityError

_SCALE_BITS = 12
_SCALE = 1 << _SCALE_BITS
_FLOOR = np.uint64(1 << 15)  # states stay in [2**15, 2**31)
_DIRECT = 16
_TOKENS = 256
_WAYS = 4
_FIXED = np.dtype([("states", "<u4", _WAYS), ("words", "<u4")])
_LOW = np.uint64(0xFFFF)
_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(_SCALE_BITS)
_SLOTS = np.uint64(_SCALE - 1)


@njit(nogil=True, inline="always")
def _value(values, signed, i):
    """Gaps count from 1, steps are never 0 (zigzag: -1, 1, -2, ... are 0, 1, 2, ...)."""
    if signed:
        step = np.int64(values[i])
        return np.uint64((step << np.int64(1)) ^ (step >> np.int64(63))) - np.uint64(1)
    return np.uint64(values[i]) - np.uint64(1)


@njit(nogil=True, inline="always")
def _put(held, bits, low, size, raw, at):
    """Append `size` <= 32 bits to the 32-bit words of `raw`. No branches here and below: data would mispredict them."""
    held |= low << bits
    bits += size
    raw[at] = held & _WORD
    full = bits >> np.uint64(5)
    return held >> (full << np.uint64(5)), bits & np.uint64(31), at + np.int64(full)


@njit(cache=True, nogil=True)
def _tokenise(values, signed, tokens, counts, raw):
    """Split `values` into `tokens` u8, tallied in `counts`, and bits in `raw` uint32; returns the words of `raw` used."""
    held, bits, at = np.uint64(0), np.uint64(0), 0
    for i in range(values.size):
        value = _value(values, signed, i)
        if signed and value < np.uint64(_DIRECT):  # nearly all steps, and hardly any gap
            tokens[i] = value
            counts[value] += 1
            continue
        large = np.uint64(value >= np.uint64(_DIRECT))
        top = np.uint64(highest(value | np.uint64(_DIRECT)))
        size = (top - np.uint64(2)) * large
        quarter = np.uint64(_DIRECT) + ((top - np.uint64(4)) << np.uint64(2)) + ((value >> size) & np.uint64(3))
        token = quarter if large else value
        tokens[i] = token
        counts[token] += 1
        low = value & ((np.uint64(1) << size) - np.uint64(1))
        if size > np.uint64(32):
            held, bits, at = _put(held, bits, low & _WORD, np.uint64(32), raw, at)
            low >>= np.uint64(32)
            size -= np.uint64(32)
        held, bits, at = _put(held, bits, low, size, raw, at)
    if bits:
        raw[at] = held
        at += 1
    return at


@njit(nogil=True, inline="always")
def _push(state, token, pushes, words, at):
    reciprocal, shift, complement, bias, limit = pushes[token]
    full = np.int64(state >= limit)
    words[at - 1] = state & _LOW
    at -= full
    state >>= np.uint64(full << 4)
    quotient = ((state * reciprocal) >> np.uint64(32)) >> shift  # state // frequency
    return state + bias + quotient * complement, at


@njit(cache=True, nogil=True)
def _encode(tokens, pushes, states, words):
    """Code `tokens` backwards into the end of `words` u16, so that they decode forwards; returns where they start."""
    at = words.size
    for way in range(_WAYS):
        states[way] = _FLOOR
    whole = tokens.size // _WAYS * _WAYS
    for i in range(tokens.size - 1, whole - 1, -1):
        states[i - whole], at = _push(states[i - whole], tokens[i], pushes, words, at)
    a, b, c, d = states[0], states[1], states[2], states[3]
    for i in range(whole - _WAYS, -1, -_WAYS):
        d, at = _push(d, tokens[i + 3], pushes, words, at)
        c, at = _push(c, tokens[i + 2], pushes, words, at)
        b, at = _push(b, tokens[i + 1], pushes, words, at)
        a, at = _push(a, tokens[i], pushes, words, at)
    states[0], states[1], states[2], states[3] = a, b, c, d
    return at


@njit(nogil=True, inline="always")
def _pop(state, slots, words, at):
    packed = np.uint64(slots[state & _SLOTS])
    state = ((packed >> np.uint64(20)) + np.uint64(1)) * (state >> _SHIFT) + ((packed >> np.uint64(8)) & _SLOTS)
    empty = np.uint64(state < _FLOOR)
    # A damaged stream may ask for more words than there are: the count is checked at the end.
    word = np.uint64(words[min(at, words.size - 1)])
    return (state << (empty << np.uint64(4))) | (word * empty), packed & np.uint64(255), at + np.int64(empty)


@njit(cache=True, nogil=True)
def _decode(slots, states, words, tokens):
    """Inverse of `_encode`; `words` has one spare at its end. True when it ends where the encoder began."""
    at = 0
    whole = tokens.size // _WAYS * _WAYS
    a, b, c, d = states[0], states[1], states[2], states[3]
    for i in range(0, whole, _WAYS):
        a, tokens[i], at = _pop(a, slots, words, at)
        b, tokens[i + 1], at = _pop(b, slots, words, at)
        c, tokens[i + 2], at = _pop(c, slots, words, at)
        d, tokens[i + 3], at = _pop(d, slots, words, at)
    states[0], states[1], states[2], states[3] = a, b, c, d
    for i in range(whole, tokens.size):
        states[i - whole], tokens[i], at = _pop(states[i - whole], slots, words, at)
    done = at == words.size - 1
    for way in range(_WAYS):
        done &= states[way] == _FLOOR
    return done


@njit(nogil=True, inline="always")
def _take(raw, position, size):
    """`size` <= 32 bits of `raw` from bit `position`; zeros or anything behind its end, which is checked later."""
    word = min(np.int64(position >> np.uint64(5)), raw.size - 2)
    pair = np.uint64(raw[word]) | (np.uint64(raw[word + 1]) << np.uint64(32))
    return (pair >> (position & np.uint64(31))) & ((np.uint64(1) << size) - np.uint64(1))


@njit(cache=True, nogil=True)
def _rebuild(tokens, signed, raw, values):
    """Inverse of `_tokenise`: fill `values`; `raw` has two spare words. True when exactly the others were used."""
    position = np.uint64(0)
    for i in range(tokens.size):
        token = np.uint64(tokens[i])
        value = token
        if not signed or token >= np.uint64(_DIRECT):
            large = np.uint64(token >= np.uint64(_DIRECT))
            size = (((token - np.uint64(_DIRECT) * large) >> np.uint64(2)) + np.uint64(2)) * large
            value = (np.uint64(4) | (token & np.uint64(3))) << size if large else token
            first = min(size, np.uint64(32))
            value |= _take(raw, position, first)
            if size > first:
                value |= _take(raw, position + first, size - first) << first
            position += size
        value += np.uint64(1)
        if signed:
            values[i] = np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1))
        else:
            values[i] = value
    return np.int64((position + np.uint64(31)) >> np.uint64(5)) == raw.size - 2


@njit(cache=True, nogil=True)
def _frequencies(counts):
    """`counts` int64 [256] scaled to sum to 4096; what occurs keeps at least 1."""
    total = counts.sum()
    scaled = np.zeros(_TOKENS, np.int64)
    for token in range(_TOKENS):
        if counts[token]:
            scaled[token] = max(1, counts[token] * _SCALE // total)
    missing = _SCALE - scaled.sum()
    while missing:  # rounding: the most frequent ones pay or gain
        largest = scaled.argmax()
        share = max(missing, -(scaled[largest] // 2))
        scaled[largest] += share
        missing -= share
    return scaled


@njit(cache=True, nogil=True)
def _push_table(frequencies):
    """What coding a token needs, uint64 [256, 5]: a division by its frequency as multiply and shift, exact for states.

    state' = state + bias + (state // f) * (4096 - f), as in F. Giesen's public-domain rans_byte.
    """
    table = np.zeros((_TOKENS, 5), np.uint64)
    start = 0
    for token in range(_TOKENS):
        frequency = frequencies[token]
        if frequency == 0:
            continue
        shift = 0
        while (1 << shift) < frequency:
            shift += 1
        if frequency == 1:  # the reciprocal does not fit: makes state - 1, which the bias repairs
            table[token, 0], table[token, 3] = (1 << 32) - 1, start + _SCALE - 1
        else:
            table[token, 0], table[token, 3] = ((1 << (shift + 31)) + frequency - 1) // frequency, start
            table[token, 1] = shift - 1
        table[token, 2] = _SCALE - frequency
        table[token, 4] = frequency << 19
        start += frequency
    return table


@njit(cache=True, nogil=True)
def _slot_table(frequencies):
    """What each of the 4096 slots means, uint32: token, offset in its range << 8, its frequency - 1 << 20."""
    slots = np.zeros(_SCALE, np.uint32)
    at = 0
    for token in range(_TOKENS):
        for offset in range(frequencies[token]):
            slots[at] = token | (offset << 8) | ((frequencies[token] - 1) << 20)
            at += 1
    return slots


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128, value >> 7])


def encode_values(values: np.ndarray) -> bytes:
    """Code `values` [n >= 1]: unsigned and at least 1 (gaps), or signed and never 0 (steps). Deterministic."""
    signed = values.dtype.kind == "i"
    tokens, counts = scratch("tokens", values.size, np.uint8), np.zeros(_TOKENS, np.int64)
    raw = scratch("raw", values.nbytes // 4 + 3, np.uint32)
    raw = raw[: _tokenise(values, signed, tokens, counts, raw)]
    frequencies = _frequencies(counts)
    words, states = scratch("words", values.size + 2, np.uint16), np.empty(_WAYS, np.uint64)
    words = words[_encode(tokens, _push_table(frequencies), states, words) :]
    used = np.flatnonzero(counts)
    low, high = int(used[0]), int(used[-1])
    fixed = np.zeros(1, _FIXED)
    fixed["states"], fixed["words"] = states.astype(np.uint32), words.size
    table = b"".join(_varint(int(frequency)) for frequency in frequencies[low : high + 1])
    return b"".join(
        [bytes([low, high - low]), table, fixed.tobytes(), words.astype("<u2").tobytes(), raw.astype("<u4").tobytes()]
    )


def decode_values(data: bytes, values: np.ndarray) -> None:
    """Inverse of `encode_values`: fill `values` [n], of the dtype that was coded.

    Raises IntegrityError when `data` is not a stream of exactly n values.
    """
    try:
        frequencies, at = _read_table(data)
        fixed = np.frombuffer(data, _FIXED, 1, at)[0]
        at += _FIXED.itemsize
        words = _padded("words", np.frombuffer(data, "<u2", int(fixed["words"]), at), 1)
        at += 2 * int(fixed["words"])
        raw = _padded("raw", np.frombuffer(data, "<u4", (len(data) - at) // 4, at), 2)
    except (IndexError, ValueError) as error:
        raise IntegrityError(f"a delta stream is cut short: {error}") from None
    if frequencies.sum() != _SCALE:
        raise IntegrityError("a delta stream has a damaged table")
    tokens, states = scratch("tokens", values.size, np.uint8), fixed["states"].astype(np.uint64)
    whole = _decode(_slot_table(frequencies), states, words, tokens)
    if not whole or not _rebuild(tokens, values.dtype.kind == "i", raw, values):
        raise IntegrityError(f"a delta stream does not hold the {values.size} values that its header names")


def _padded(use: str, array: np.ndarray, spare: int) -> np.ndarray:
    """A copy in native byte order with `spare` zeros behind it."""
    copy = scratch(use, array.size + spare, array.dtype.newbyteorder("="))
    copy[: array.size] = array
    copy[array.size :] = 0
    return copy


def _read_table(data: bytes) -> tuple[np.ndarray, int]:
    low, number, at = data[0], data[1] + 1, 2
    frequencies = np.zeros(_TOKENS, np.int64)
    for token in range(low, low + number):
        frequencies[token] = data[at]
        if data[at] >= 128:
            at += 1
            frequencies[token] += (data[at] - 1) * 128
        at += 1
    return frequencies, at
