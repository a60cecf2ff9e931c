"""Entropy coder of the delta streams: unsigned integers as tokens (range ANS) and raw low bits.

A value below 16 is its own token; above, the token holds its size in bits and its next two bits (a quarter octave),
and what is left of it goes out as raw bits, because within a quarter octave gaps are spread almost evenly. Tokens are
coded by range ANS (J. Duda, arXiv 1311.2540): 12-bit frequencies, four interleaved 31-bit states, 16-bit words.
Neighbouring classes share a table where that is smaller than one for each.

A coded stream:

    u32 n | n x u32 raw bits, first value lowest | groups of classes, until all classes are named:
    LEB128 number of classes | u8 lowest token | u8 number of tokens - 1 | frequency of each, LEB128 | LEB128 words
    | 4 x u32 states | u16 words

The coder is compiled, releases the interpreter lock and costs about half of what pcodec does for these streams, with
tables a third the size.
"""

from __future__ import annotations

from collections.abc import Sequence

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
_NO_TABLE = 128  # values that are too few for a table of their own
_GROUP_BYTES = 24  # of a group besides its frequencies and words
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
def _tokenise(values, signed, ends, tokens, counts, raw):
    """Split `values` into `tokens` u8 and bits in `raw` uint32; returns the words of `raw` used.

    `counts` int64 [classes, 256] tallies the tokens of the classes, which end at `ends`.
    """
    held, bits, at, class_ = np.uint64(0), np.uint64(0), 0, 0
    for i in range(values.size):
        while i == ends[class_]:
            class_ += 1
        value = _value(values, signed, i)
        if signed and value < np.uint64(_DIRECT):  # nearly all steps, and hardly any gap
            tokens[i] = value
            counts[class_, value] += 1
            continue
        large = np.uint64(value >= np.uint64(_DIRECT))
        top = np.uint64(highest(value | np.uint64(_DIRECT)))
        size = (top - np.uint64(2)) * large
        quarter = np.uint64(_DIRECT) + ((top - np.uint64(4)) << np.uint64(2)) + ((value >> size) & np.uint64(3))
        token = quarter if large else value
        tokens[i] = token
        counts[class_, token] += 1
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


@njit(cache=True, nogil=True)
def _cost(counts):
    """Bits that a group with these token counts int64 [256] takes, its table included."""
    total = counts.sum()
    bits = 8.0 * _GROUP_BYTES
    for token in range(_TOKENS):
        if counts[token]:
            bits += counts[token] * np.log2(total / counts[token]) + 10.4
    return bits


@njit(cache=True, nogil=True)
def _groups(tables):
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
        for k in range(max(0, at - 1), min(at + 1, groups - 1)):
            gains[k] = alone[k] + alone[k + 1] - _cost(tables[k] + tables[k + 1])
    return sizes[:groups]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_values(values: np.ndarray, counts: Sequence[int]) -> bytes:
    """Code `values` [n >= 1], classes of `counts` values after each other. Deterministic.

    Unsigned and at least 1 (gaps), or signed and never 0 (steps).
    """
    signed = values.dtype.kind == "i"
    tokens = scratch("tokens", values.size, np.uint8)
    raw = scratch("raw", values.nbytes // 4 + 3, np.uint32)
    tallies = np.zeros((len(counts), _TOKENS), np.int64)
    raw = raw[: _tokenise(values, signed, np.cumsum(counts), tokens, tallies, raw)]
    parts = [np.uint32(raw.size).astype("<u4").tobytes(), raw.astype("<u4").tobytes()]
    start = 0
    for tally, size in zip(tallies, _groups(tallies).tolist(), strict=False):
        stop = start + int(tally.sum())
        parts += [_varint(size), *_encode_group(tokens[start:stop], tally)]
        start = stop
    return b"".join(parts)


def _encode_group(tokens: np.ndarray, tally: np.ndarray) -> list[bytes]:
    frequencies = _frequencies(tally)
    words, states = scratch("words", tokens.size + 2, np.uint16), np.empty(_WAYS, np.uint64)
    words = words[_encode(tokens, _push_table(frequencies), states, words) :]
    used = np.flatnonzero(tally)
    low, high = int(used[0]), int(used[-1])
    table = [_varint(int(frequency)) for frequency in frequencies[low : high + 1]]
    head = [bytes([low, high - low]), *table, _varint(words.size)]
    return [*head, states.astype("<u4").tobytes(), words.astype("<u2").tobytes()]


class _Cursor:
    """Reads a stream from its start. Raises IndexError at its end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def array(self, use: str, dtype: str, count: int, spare: int) -> np.ndarray:
        """The next `count` numbers in native byte order, with `spare` zeros behind them."""
        found = np.frombuffer(self.data, dtype, count, self.at) if count else np.empty(0, dtype)
        self.at += found.nbytes
        copy = scratch(use, count + spare, np.dtype(dtype).newbyteorder("="))
        copy[:count] = found
        copy[count:] = 0
        return copy


def decode_values(data: bytes, counts: Sequence[int], values: np.ndarray) -> None:
    """Inverse of `encode_values`: fill `values` [sum of `counts`], of the dtype that was coded.

    Raises IntegrityError when `data` is not a stream of exactly these values.
    """
    tokens = scratch("tokens", values.size, np.uint8)
    cursor = _Cursor(data)
    start = class_ = 0
    try:
        raw = cursor.array("raw", "<u4", cursor.array("size", "<u4", 1, 0)[0], 2)
        while class_ < len(counts):
            size = cursor.varint()
            stop = start + sum(counts[class_ : class_ + size])
            whole = _decode_group(cursor, tokens[start:stop])
            start, class_ = stop, class_ + size
            if not whole:
                break
    except (IndexError, ValueError) as error:
        raise IntegrityError(f"a delta stream is cut short: {error}") from None
    intact = start == values.size and class_ == len(counts) and cursor.at == len(data)
    if not intact or not _rebuild(tokens, values.dtype.kind == "i", raw, values):
        raise IntegrityError(f"a delta stream does not hold the {values.size} values that its header names")


def _decode_group(cursor: _Cursor, tokens: np.ndarray) -> bool:
    low = cursor.byte()
    frequencies = np.zeros(_TOKENS, np.int64)
    for token in range(low, low + cursor.byte() + 1):
        frequencies[token] = cursor.varint()
    count = cursor.varint()
    states = cursor.array("states", "<u4", _WAYS, 0).astype(np.uint64)
    words = cursor.array("words", "<u2", count, 1)
    return bool(frequencies.sum() == _SCALE and _decode(_slot_table(frequencies), states, words, tokens))
