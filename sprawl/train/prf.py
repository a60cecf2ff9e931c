"""The keyed mask of the boundary codec: exactly k of H channels a token, from integers alone.

Both ends of a link derive the same channels from (seed, layer, step, sample, position); nothing is transmitted
(status report, section 1.2). The function is a chain of splitmix64 finalisers in wrapping 64-bit arithmetic:

    key   = fold(seed, layer, step)
    token = mix(mix(key ^ mix(sample + G)) ^ mix(position + G))
    score = mix(token + G * (channel + 1)), its low ceil(log2 H) bits replaced by the channel
    kept  = the k largest scores (signed order), in ascending channel order

The channel in the low bits makes every score distinct, so that no device can break a tie its own way.
`reference_channels` is torch on any device, the definition; `channels` is a compiled loop on the CPU and one kernel on
a GPU (`prf_triton`). All give the same integers.
"""

from __future__ import annotations

from importlib.util import find_spec

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
def _kth_largest(values, count, keep):  # pragma: no cover - compiled
    """The `keep`-th largest of values[:count], all distinct; reorders them (Hoare's selection)."""
    low, high, target = 0, count - 1, count - keep
    while low < high:
        pivot = values[(low + high) >> 1]
        left, right = low, high
        while left <= right:
            while values[left] < pivot:
                left += 1
            while values[right] > pivot:
                right -= 1
            if left <= right:
                values[left], values[right] = values[right], values[left]
                left += 1
                right -= 1
        if target <= right:
            high = right
        elif target >= left:
            low = left
        else:
            break
    return values[target]


@numba.njit(cache=True, nogil=True)
def _channels_loop(key, sample, position, channels, keep, low, guess, out):  # pragma: no cover - compiled
    golden = np.uint64(0x9E3779B97F4A7C15)
    scores = np.empty(channels, np.int64)
    likely = np.empty(channels, np.int64)
    work = np.empty(channels, np.int64)
    for row in range(sample.shape[0]):
        token = _mix_word(key ^ _mix_word(np.uint64(sample[row]) + golden))
        token = _mix_word(token ^ _mix_word(np.uint64(position[row]) + golden))
        for channel in range(channels):  # no dependence between channels: compiled to vector instructions
            word = _mix_word(token + golden * np.uint64(channel + 1))
            scores[channel] = np.int64((word & ~low) | np.uint64(channel))
        # Scores are uniform, so a fixed threshold leaves little more than `keep` of them to select from.
        count = 0
        for channel in range(channels):
            likely[count] = scores[channel]
            count += scores[channel] >= guess
        if count < keep:
            likely[:] = scores
            count = channels
        work[:count] = likely[:count]
        cut = _kth_largest(work, count, keep)
        slot = 0
        for place in range(count):  # still in ascending channel order
            if likely[place] >= cut:
                out[row, slot] = np.int64(np.uint64(likely[place]) & low)
                slot += 1


def _likely_threshold(channels: int, keep: int) -> int:
    """A score that about keep + 4 sqrt(keep) + 8 of `channels` uniform int64 scores reach."""
    share = min(1.0, (keep + 4 * keep**0.5 + 8) / channels)
    return max(-(1 << 63), (1 << 63) - 1 - int(share * (1 << 64)))


@numba.njit(cache=True, nogil=True)
def _uniform_loop(key, sample, position, channel, out):  # pragma: no cover - compiled
    golden = np.uint64(0x9E3779B97F4A7C15)
    for row in range(channel.shape[0]):
        token = _mix_word(key ^ _mix_word(np.uint64(sample[row]) + golden))
        token = _mix_word(token ^ _mix_word(np.uint64(position[row]) + golden))
        for place in range(channel.shape[1]):
            word = _mix_word(token + golden * np.uint64(channel[row, place] + 1))
            out[row, place] = np.float32(word >> np.uint64(40)) * np.float32(2.0**-24)


def uniform(key: int, sample: Tensor, position: Tensor, channel: Tensor) -> Tensor:
    """fp32 numbers in [0, 1) for channels [n, m] int64 of n tokens: the top 24 bits of the score's hash.

    The same integers as the mask's, so the same on every device; take another key than a mask's (`derive_key`).
    """
    if channel.device.type == "cpu":
        out = np.empty(channel.shape, np.float32)
        _uniform_loop(np.uint64(key), sample.numpy(), position.numpy(), channel.numpy(), out)
        return torch.from_numpy(out)
    golden = _signed(GOLDEN)
    token = _mix_tensor(_signed(key) ^ _mix_tensor(sample + golden))
    token = _mix_tensor(token ^ _mix_tensor(position + golden))
    return _shift_right(_mix_tensor(token[:, None] + (channel + 1) * golden), 40).float() * 2.0**-24


def channels(key: int, sample: Tensor, position: Tensor, channels: int, keep: int) -> Tensor:
    """As `reference_channels`, without ever materialising the scores of more than one token: a compiled loop on the
    CPU, a Triton kernel on a GPU where Triton is installed.

    Raises ValueError unless 1 <= keep <= channels.
    """
    if not 1 <= keep <= channels:
        raise ValueError(f"keep={keep} must be between 1 and {channels} channels")
    if sample.device.type == "cpu":
        out = np.empty((sample.shape[0], keep), np.int64)
        low = np.uint64((1 << channel_bits(channels)) - 1)
        guess = np.int64(_likely_threshold(channels, keep))
        _channels_loop(np.uint64(key), sample.numpy(), position.numpy(), channels, keep, low, guess, out)
        return torch.from_numpy(out)
    if sample.is_cuda and find_spec("triton") is not None:
        from sprawl.train.prf_triton import fused_channels

        return fused_channels(key, sample, position, channels, keep)
    return reference_channels(key, sample, position, channels, keep)
