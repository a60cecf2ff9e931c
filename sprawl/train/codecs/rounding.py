"""Numbers as few bits: stochastic rounding with one scale per 32 values, packed into bytes.

A group of 32 consecutive values shares a step, stored as bf16 (fp16 loses the small gradients of a token mean); a
value becomes one of 2^bits levels spread evenly over [-max, max]:

    step  = max|v| / (2^bits - 1) * 2, rounded up to bf16
    code  = floor(v / step + (2^bits - 1) / 2 + u), u uniform in [0, 1)
    value = (code - (2^bits - 1) / 2) * step

so E[value] = v. A token's bytes are its steps (little endian), then its codes, first code in the lowest bits, padded
with zeros. `encode` and `decode` are compiled loops on the CPU and torch elsewhere; both give the same bytes.
A group with a value that is not finite decodes to nothing finite: the step that sees it is refused, not repaired.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from sprawl.train import prf

GROUP = 32
STEP_BYTES = 2
_NAN = 0x7FC00000


def groups_of(count: int) -> int:
    return -(-count // GROUP)


def bytes_of(count: int, bits: int) -> int:
    """Bytes that `count` values of a token take."""
    return groups_of(count) * STEP_BYTES + (count * bits + 7) // 8


def values_in(budget: int, bits: int, limit: int) -> int:
    """The most values, at most `limit`, that fit in `budget` bytes; 0 when not even one does."""
    count = min(limit, 8 * budget // bits)
    while count and bytes_of(count, bits) > budget:
        count -= 1
    return count


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes [n, m] uint8 below 2^bits -> [n, ceil(m * bits / 8)] uint8, first code in the lowest bits."""
    rows, count = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -count % 8)).view(rows, -1, 8).to(torch.int64)
    words = (padded << (bits * torch.arange(8, device=codes.device))).sum(-1)
    data = (words[..., None] >> (8 * torch.arange(bits, device=codes.device))) & 255
    return data.to(torch.uint8).view(rows, -1)[:, : (count * bits + 7) // 8]


def unpack_bits(data: Tensor, count: int, bits: int) -> Tensor:
    """Inverse of `pack_bits`: [n, ceil(count * bits / 8)] uint8 -> [n, count] uint8."""
    rows, size = data.shape
    padded = torch.nn.functional.pad(data, (0, -size % bits)).view(rows, -1, bits).to(torch.int64)
    words = (padded << (8 * torch.arange(bits, device=data.device))).sum(-1)
    codes = (words[..., None] >> (bits * torch.arange(8, device=data.device))) & ((1 << bits) - 1)
    return codes.to(torch.uint8).view(rows, -1)[:, :count]


def reference_encode(values: Tensor, noise: Tensor, bits: int, size: int) -> Tensor:
    """Values and noise in [0, 1), [n, m] fp32 each -> [n, size] uint8 on any device."""
    rows, count = values.shape
    middle = ((1 << bits) - 1) / 2
    groups = groups_of(count)
    padded = torch.nn.functional.pad(values, (0, groups * GROUP - count)).view(rows, groups, GROUP)
    exact = padded.abs().amax(-1) / middle
    # Up to the next bf16: the largest value of a group stays inside its range.
    word = (exact.view(torch.int32) + 0xFFFF) & ~0xFFFF
    fits = exact.isfinite() & word.view(torch.float32).isfinite()
    word = torch.where(fits, word, _NAN)
    step = word.view(torch.float32)
    ratio = torch.where(step[..., None] > 0, padded / step[..., None], 0.0)
    level = (ratio.view(rows, -1)[:, :count] + middle + noise).floor()
    codes = level.nan_to_num(0.0).clamp(0, (1 << bits) - 1).to(torch.uint8)
    steps = (word >> 16).to(torch.int16).view(torch.uint8).view(rows, -1)  # a cast would choose its own NaN
    data = torch.cat((steps, pack_bits(codes, bits)), dim=1)
    return torch.nn.functional.pad(data, (0, size - data.shape[1]))


def reference_decode(data: Tensor, count: int, bits: int) -> Tensor:
    """[n, size] uint8 -> [n, count] fp32 on any device."""
    steps, rest = groups_of(count) * STEP_BYTES, (count * bits + 7) // 8
    step = data[:, :steps].contiguous().view(torch.bfloat16).float()
    codes = unpack_bits(data[:, steps : steps + rest], count, bits)
    middle = ((1 << bits) - 1) / 2
    return (codes.float() - middle) * step.repeat_interleave(GROUP, dim=1)[:, :count]


@numba.njit(cache=True, nogil=True)
def _encode_loop(values, noise, bits, steps, out):  # pragma: no cover - compiled
    top_level = (1 << bits) - 1
    middle = np.float32(top_level / 2)
    rows, count = values.shape
    number = np.empty(1, np.float32)
    word = number.view(np.uint32)
    for row in range(rows):
        place, held, filled = steps, np.uint64(0), 0
        for group in range((count + GROUP - 1) // GROUP):
            start, end = group * GROUP, min(count, group * GROUP + GROUP)
            top, finite = np.float32(0.0), True
            for i in range(start, end):
                size = abs(values[row, i])
                finite = finite and size < np.inf
                top = max(top, size)
            number[0] = top / middle
            word[0] = (word[0] + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
            if not finite or not number[0] < np.inf:
                number[0] = np.nan
            out[row, 2 * group] = (word[0] >> np.uint32(16)) & np.uint32(255)
            out[row, 2 * group + 1] = word[0] >> np.uint32(24)
            step = number[0]
            for i in range(start, end):
                ratio = values[row, i] / step if step > 0 else np.float32(0.0)
                level = np.floor(np.float32(np.float32(ratio + middle) + noise[row, i]))
                code = np.uint64(min(max(level, np.float32(0.0)), np.float32(top_level))) if level == level else 0
                held |= np.uint64(code) << np.uint64(filled)
                filled += bits
                while filled >= 8:
                    out[row, place] = held & np.uint64(255)
                    held >>= np.uint64(8)
                    filled -= 8
                    place += 1
        if filled:
            out[row, place] = held & np.uint64(255)


@numba.njit(cache=True, nogil=True)
def _decode_loop(data, bits, steps, out):  # pragma: no cover - compiled
    top_level = np.uint64((1 << bits) - 1)
    middle = np.float32(((1 << bits) - 1) / 2)
    rows, count = out.shape
    number = np.empty(1, np.float32)
    word = number.view(np.uint32)
    for row in range(rows):
        place, held, filled = steps, np.uint64(0), 0
        for i in range(count):
            if i % GROUP == 0:
                group = i // GROUP
                low, high = np.uint32(data[row, 2 * group]), np.uint32(data[row, 2 * group + 1])
                word[0] = (low << np.uint32(16)) | (high << np.uint32(24))
            while filled < bits:
                held |= np.uint64(data[row, place]) << np.uint64(filled)
                filled += 8
                place += 1
            out[row, i] = (np.float32(held & top_level) - middle) * number[0]
            held >>= np.uint64(bits)
            filled -= bits


def encode(values: Tensor, key: int, sample: Tensor, position: Tensor, channel: Tensor, bits: int, size: int) -> Tensor:
    """Values [n, m] fp32 -> [n, size] uint8. The rounding noise is the PRF's under `key` for channels [n, m] int64 of
    the tokens `sample`, `position` [n] int64, so a pass that is repeated rounds the same way."""
    noise = prf.uniform(key, sample, position, channel)
    if values.device.type != "cpu":
        return reference_encode(values, noise, bits, size)
    out = np.zeros((values.shape[0], size), np.uint8)
    _encode_loop(values.contiguous().numpy(), noise.numpy(), bits, groups_of(values.shape[1]) * STEP_BYTES, out)
    return torch.from_numpy(out)


def decode(data: Tensor, count: int, bits: int) -> Tensor:
    """[n, size] uint8 -> the `count` values of each token, [n, count] fp32."""
    if data.device.type != "cpu":
        return reference_decode(data, count, bits)
    out = np.empty((data.shape[0], count), np.float32)
    _decode_loop(data.contiguous().numpy(), bits, groups_of(count) * STEP_BYTES, out)
    return torch.from_numpy(out)
