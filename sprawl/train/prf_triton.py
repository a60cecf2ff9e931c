"""The keyed mask as one Triton kernel: a program a token, scores never leave the registers.

Imported only where Triton is installed (CUDA wheels of torch bring it). The k-th largest score is found bit by bit, 64
counts over the channels, so that no sort is needed; channels are then written at their rank, ascending.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sprawl.train.prf import channel_bits


@triton.jit
def _mix(x):  # pragma: no cover - compiled
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mask_kernel(
    key_ptr,
    sample_ptr,
    position_ptr,
    out_ptr,
    channels: tl.constexpr,
    keep: tl.constexpr,
    low: tl.constexpr,
    block: tl.constexpr,
):  # pragma: no cover - compiled
    row = tl.program_id(0)
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    key = tl.load(key_ptr).to(tl.uint64, bitcast=True)
    sample = tl.load(sample_ptr + row).to(tl.uint64, bitcast=True)
    position = tl.load(position_ptr + row).to(tl.uint64, bitcast=True)
    token = _mix(key ^ _mix(sample + golden))
    token = _mix(token ^ _mix(position + golden))
    channel = tl.arange(0, block)
    wide = channel.to(tl.uint64)
    score = _mix(token + golden * (wide + 1))
    # Flipping the top bit makes the unsigned order the signed one of the definition.
    score = ((score >> low) << low | wide) ^ (tl.full((), 1, tl.uint64) << 63)
    real = channel < channels
    cut = tl.full((), 0, tl.uint64)
    for bit in range(64):
        trial = cut | (tl.full((), 1, tl.uint64) << (63 - bit))
        reached = tl.sum((real & (score >= trial)).to(tl.int32), axis=0)
        cut = tl.where(reached >= keep, trial, cut)
    kept = real & (score >= cut)
    rank = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    tl.store(out_ptr + row.to(tl.int64) * keep + rank, channel.to(tl.int64), mask=kept)


def fused_channels(key: int, sample: Tensor, position: Tensor, channels: int, keep: int) -> Tensor:
    """As `prf.reference_channels`, on the device of `sample`. One launch; nothing but the result is allocated."""
    out = torch.empty(sample.shape[0], keep, dtype=torch.int64, device=sample.device)
    signed = key - (1 << 64) if key >> 63 else key
    word = torch.tensor([signed], dtype=torch.int64, device=sample.device)
    if sample.shape[0]:
        _mask_kernel[(sample.shape[0],)](
            word,
            sample.contiguous(),
            position.contiguous(),
            out,
            channels=channels,
            keep=keep,
            low=channel_bits(channels),
            block=triton.next_power_of_2(channels),
        )
    return out
