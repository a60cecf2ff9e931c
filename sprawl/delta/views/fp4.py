"""fp4 weights (E2M1, two to a byte, first element in the low nibble) with mxfp4's or nvfp4's scales. fp32 arithmetic.

mxfp4: a power of two a group of 32, stored as its biased exponent (E8M0).
nvfp4: an e4m3 scale a group of 16, under one fp32 scale a tensor that uses the whole e4m3 range. Both scales are
stored as factors that the element was multiplied by on the way there: value = code * group / tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of codes 0 to 7; bit 3 of a code is the sign."""

_MAX = GRID[-1]
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_SCALE = 0.125  # what compressed-tensors stores for a group of zeros


def codes(values: Tensor) -> Tensor:
    """uint8 codes of fp32 `values`, rounded to the nearest grid point, ties to the even code, saturating.

    A negative value that rounds to zero keeps its sign; -0.0 itself becomes +0.0 (as in compressed-tensors).
    """
    magnitude = values.abs()
    code = (values < 0).to(torch.uint8) << 3
    # One step up at every midpoint; a tie goes to the neighbour with an even code.
    for index in range(7):
        middle = (GRID[index] + GRID[index + 1]) / 2
        code += magnitude >= middle if index % 2 else magnitude > middle
    return code


def pack(code: Tensor) -> Tensor:
    """uint8 [rows, columns / 2] of uint8 codes [rows, columns]."""
    return code[:, 0::2] | (code[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8 codes [rows, columns] of uint8 [rows, columns / 2]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).reshape(packed.shape[0], -1)


def grid_values(code: Tensor) -> Tensor:
    """fp32 values of codes."""
    grid = torch.tensor([*GRID, *(-value for value in GRID)], device=code.device)
    return grid[code.int()]


def _grouped(weight: Tensor, size: int) -> Tensor:
    return weight.float().reshape(weight.shape[0], -1, size)


def nvfp4_global_scale(weights: list[Tensor]) -> Tensor:
    """fp32 [1]: the tensor scale that `weights` share; 1 when they are too small for one."""
    amax = torch.stack([weight.abs().amax().float() for weight in weights]).amax()
    scale = (_E4M3_MAX * _MAX) / amax.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0).reshape(1)


def quantize_nvfp4(weight: Tensor, global_scale: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(packed uint8 [rows, columns / 2], e4m3 scales [rows, columns / size])."""
    grouped = _grouped(weight, size)
    scale = (global_scale * (grouped.abs().amax(dim=2) / _MAX)).clamp_(max=_E4M3_MAX).to(torch.float8_e4m3fn).float()
    scale = torch.where(scale == 0, _SMALLEST_SCALE, scale)
    scaled = grouped / (scale / global_scale)[..., None]
    return pack(codes(scaled.reshape(weight.shape))), scale.to(torch.float8_e4m3fn)


def dequantize_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """fp32 [rows, columns]."""
    return _scale_groups(packed, scale.float() / global_scale)


def quantize_mxfp4(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(packed uint8 [rows, columns / 2], E8M0 scales uint8 [rows, columns / size]).

    The exponent is that of the group's largest magnitude, rounded up from 1.75 * 2**e (which would saturate), less 2.
    """
    grouped = _grouped(weight, size)
    bits = grouped.abs().amax(dim=2).view(torch.int32)
    exponent = (((bits + (1 << 21)) >> 23) - 2).clamp_(min=0).to(torch.uint8)
    scaled = grouped / e8m0_values(exponent)[..., None]
    return pack(codes(scaled.reshape(weight.shape))), exponent


def e8m0_values(exponent: Tensor) -> Tensor:
    """fp32 2**(exponent - 127); exponent 0 is the subnormal 2**-127."""
    wide = exponent.to(torch.int32)
    return torch.where(wide == 0, 1 << 22, wide << 23).view(torch.float32)


def dequantize_mxfp4(packed: Tensor, exponent: Tensor) -> Tensor:
    """fp32 [rows, columns]."""
    return _scale_groups(packed, e8m0_values(exponent))


def _scale_groups(packed: Tensor, scale: Tensor) -> Tensor:
    values = grid_values(unpack(packed))
    return (values.reshape(*scale.shape, -1) * scale[..., None]).reshape(values.shape)
