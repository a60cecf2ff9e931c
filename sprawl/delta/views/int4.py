"""int4 weights with a bf16 scale a group (compressed-tensors `pack-quantized`, symmetric). fp32 arithmetic.

scale = max|w| / 7.5, rounded to bf16 before it is used; w / scale rounded to nearest even and clamped to [-8, 7];
stored as code + 8, eight to an int32, first element in the lowest nibble.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF_RANGE = 7.5
_ZERO_SCALE = torch.finfo(torch.bfloat16).eps  # what compressed-tensors stores for a group of zeros


def quantize_int4(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(packed int32 [rows, columns / 8], bf16 scales [rows, columns / size]). `columns` is a multiple of 8."""
    grouped = weight.float().reshape(weight.shape[0], -1, size)
    scale = (grouped.abs().amax(dim=2) / _HALF_RANGE).to(torch.bfloat16)
    scale = torch.where(scale == 0, _ZERO_SCALE, scale)
    code = (grouped / scale.float()[..., None]).clamp_(-8, 7).round_().to(torch.int8)
    return pack(code.reshape(weight.shape)), scale


def pack(code: Tensor) -> Tensor:
    """int32 [rows, columns / 8] of int8 codes [rows, columns] in [-8, 7]."""
    nibbles = (code + 8).to(torch.uint8)
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).contiguous().view(torch.int32)


def unpack(packed: Tensor) -> Tensor:
    """int8 codes [rows, columns] in [-8, 7]."""
    nibbles = packed.contiguous().view(torch.uint8)
    code = torch.stack((nibbles & 15, nibbles >> 4), dim=-1).reshape(packed.shape[0], -1)
    return code.to(torch.int8) - 8


def dequantize_int4(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [rows, columns]."""
    code = unpack(packed).float()
    return (code.reshape(*scale.shape, -1) * scale.float()[..., None]).reshape(code.shape)
