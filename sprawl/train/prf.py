"""The keyed mask of the boundary codec: exactly k of H channels a token, from integers alone.

Both ends of a link derive the same channels from (seed, layer, step, sample, position); nothing is transmitted
(status report, section 1.2). The function is a chain of splitmix64 finalisers in wrapping 64-bit arithmetic:

    key   = fold(seed, layer, step)
    token = mix(mix(key ^ mix(sample + G)) ^ mix(position + G))
    score = mix(token + G * (channel + 1)), its low ceil(log2 H) bits replaced by the channel
    kept  = the k largest scores (signed order), in ascending channel order

The channel in the low bits makes every score distinct, so that no device can break a tie its own way.
`reference_channels` is torch on any device; `channels` takes a compiled loop on the CPU. Both give the same integers.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the same bits as a 64-bit word."""
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


def mix(word: int) -> int:
    """The splitmix64 finaliser on a Python int (64-bit word)."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MIX1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX2) & _WORD
    return word ^ (word >> 31)


def derive_key(seed: int, layer: int, step: int) -> int:
    """Fold the numbers that are fixed for a boundary and a step into one 64-bit key."""
    key = 0
    for part in (seed, layer, step):
        key = mix((key ^ mix((part + GOLDEN) & _WORD)) & _WORD)
    return key


def channel_bits(channels: int) -> int:
    return max(1, (channels - 1).bit_length())


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX2)
    return x ^ _shift_right(x, 31)


def reference_channels(key: int, sample: Tensor, position: Tensor, channels: int, keep: int) -> Tensor:
    """Kept channels of n tokens, [n, keep] int64 ascending. `sample` and `position` are [n] int64.

    Plain torch operations on whatever device the inputs are on; memory is n * channels * 8 bytes a temporary.
    """
    golden = _signed(GOLDEN)
    token = _mix_tensor(_signed(key) ^ _mix_tensor(sample + golden))
    token = _mix_tensor(token ^ _mix_tensor(position + golden))
    index = torch.arange(channels, dtype=torch.int64, device=sample.device)
    score = _mix_tensor(token[:, None] + (index + 1) * golden)
    low = (1 << channel_bits(channels)) - 1
    score = (score & ~low) | index
    kept = score.topk(keep, dim=1, sorted=False).values & low
    return kept.sort(dim=1).values


@numba.njit(cache=True, nogil=True)
def _mix_word(x):  # pragma: no cover - compiled
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(cache=True, nogil=True)
def _channels_loop(key, sample, position, channels, keep, low, out):  # pragma: no cover - compiled
    golden = np.uint64(0x9E3779B97F4A7C15)
    best = np.empty(keep, np.int64)
    for row in range(sample.shape[0]):
        token = _mix_word(key ^ _mix_word(np.uint64(sample[row]) + golden))
        token = _mix_word(token ^ _mix_word(np.uint64(position[row]) + golden))
        word = token
        count = 0
        for channel in range(channels):
            word += golden
            score = np.int64((_mix_word(word) & ~low) | np.uint64(channel))
            # `best` is ascending: best[0] is the smallest score still kept.
            if count < keep:
                place = count
                while place > 0 and best[place - 1] > score:
                    best[place] = best[place - 1]
                    place -= 1
                best[place] = score
                count += 1
            elif score > best[0]:
                place = 0
                while place + 1 < keep and best[place + 1] < score:
                    best[place] = best[place + 1]
                    place += 1
                best[place] = score
        for place in range(keep):
            kept = np.int64(np.uint64(best[place]) & low)
            slot = place
            while slot > 0 and out[row, slot - 1] > kept:
                out[row, slot] = out[row, slot - 1]
                slot -= 1
            out[row, slot] = kept


def channels(key: int, sample: Tensor, position: Tensor, channels: int, keep: int) -> Tensor:
    """As `reference_channels`; on the CPU through a compiled loop that never materialises the scores.

    Raises ValueError unless 1 <= keep <= channels.
    """
    if not 1 <= keep <= channels:
        raise ValueError(f"keep={keep} must be between 1 and {channels} channels")
    if sample.device.type != "cpu":
        return reference_channels(key, sample, position, channels, keep)
    out = np.empty((sample.shape[0], keep), np.int64)
    low = np.uint64((1 << channel_bits(channels)) - 1)
    _channels_loop(np.uint64(key), sample.numpy(), position.numpy(), channels, keep, low, out)
    return torch.from_numpy(out)
