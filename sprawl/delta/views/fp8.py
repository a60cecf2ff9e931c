"""fp8 weights: one scale a tensor, a row, or a block. All arithmetic in fp32; a scale multiplies on the way back.

`scaled` (compressed-tensors): scale = max|w| / max of the dtype, w / scale rounded to nearest even.
`block` (transformers fine-grained fp8, DeepSeek-V3): the forward factor max of the dtype / max|w| multiplies, and its
reciprocal is what is stored. The two differ in the last bit of a scale, which is why both are here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_scaled(weight: Tensor, dtype: torch.dtype, *, channel: bool) -> tuple[Tensor, Tensor]:
    """(fp8 [rows, columns], fp32 scales [1] or [rows, 1]). An all-zero tensor or row has the scale eps(fp32)."""
    weight = weight.float()
    amax = weight.abs().amax(dim=1, keepdim=True) if channel else weight.abs().amax().reshape(1)
    limit = torch.finfo(dtype).max
    scale = amax / limit
    scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
    return (weight / scale).clamp_(-limit, limit).to(dtype), scale


def quantize_block(weight: Tensor, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor]:
    """(fp8 [rows, columns], fp32 inverse scales [ceil(rows / size), ceil(columns / size)]). Zero blocks: 1."""
    weight = weight.float()
    limit = torch.finfo(dtype).max
    amax = block_view(weight, size).abs().amax(dim=(1, 3))
    forward = torch.where(amax > 0, limit / torch.where(amax > 0, amax, 1.0), 1.0)
    scaled = weight * spread_blocks(forward, size, weight.shape)
    return scaled.clamp_(-limit, limit).to(dtype), 1.0 / forward


def block_view(weight: Tensor, size: int) -> Tensor:
    """[row blocks, size, column blocks, size]; the last blocks are padded with zeros."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % size, 0, -rows % size))
    return padded.reshape(padded.shape[0] // size, size, padded.shape[1] // size, size)


def spread_blocks(scales: Tensor, size: int, shape: torch.Size) -> Tensor:
    """Block scales as one scale an element: [rows, columns]."""
    return scales.repeat_interleave(size, 0)[: shape[0]].repeat_interleave(size, 1)[:, : shape[1]]


def dequantize_scaled(weight: Tensor, scale: Tensor) -> Tensor:
    """fp32 [rows, columns]."""
    return weight.float() * scale.float()


def dequantize_block(weight: Tensor, scale_inv: Tensor, size: int) -> Tensor:
    """fp32 [rows, columns]."""
    return weight.float() * spread_blocks(scale_inv.float(), size, weight.shape)
