"""The elements of a served tensor as numbers: values, rounding cells, and which of them changed, piece by piece.

Understands the layouts of `sprawl.delta.views`: packed fp4 and int4 codes are elements of their own, and values of
scaled formats are codes times scales, so that magnitudes compare across formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sprawl.delta.bits import BITS, integer_view
from sprawl.delta.checkpoints import Form, Source
from sprawl.delta.state import raw_bytes
from sprawl.delta.views import fp4, fp8, int4

CHUNK = 1 << 21
"""Elements of a piece, about; rows are not split, and blocks of 128 rows neither where scales are a block's."""

# Width of the rounding cell of each E2M1 magnitude. +0 and -0 are codes of their own. The largest is reached from one
# side only, so it moves half as often as a cell of its width (5 to 6) would.
_FP4_CELLS = np.array([0.25, 0.5, 0.5, 0.5, 0.75, 1.0, 1.5, 2.0] * 2, np.float32)
_SCALES = ("weight_scale", "weight_scale_inv", "weight_global_scale", "weight_shape")


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor before and after. `old`, `new`: served, flat. `changed` bool [n]; `values` fp32 [n] before,
    after, and cell widths, or None where elements are no weights (scales, integers, changed shapes)."""

    name: str
    old: torch.Tensor | None
    new: torch.Tensor
    changed: np.ndarray
    values: tuple[np.ndarray, np.ndarray, np.ndarray] | None


def is_scale(name: str) -> bool:
    """Whether the tensor belongs to the scales of a quantised matrix."""
    return name.rpartition(".")[2] in _SCALES


def pieces(old: Source, new: Source, name: str, serve: torch.dtype | None = None) -> Iterator[Piece]:
    """Tensor `name` of `new` beside that of `old`, about `CHUNK` elements at a time.

    `serve`: floating tensors of more bits are masters, and what is compared is their rounding to this dtype; the
    values stay those of the masters.
    """
    form = new.forms[name]
    comparable = old.forms.get(name) == form
    row = form.elements // form.shape[0] if len(form.shape) > 1 and form.elements else 1
    rows = form.elements // row if row else 0
    per_code = _codes_per_element(name, form)
    step = max(1, CHUNK // max(1, row * per_code))
    step = -(-step // 128) * 128 if name.removesuffix("weight") + "weight_scale_inv" in new.forms else step
    for begin in range(0, rows, step):
        end = min(rows, begin + step)
        after = new.read(name, begin * row, end * row)
        if not comparable:
            yield Piece(name, None, _served(after, serve), np.ones((end - begin) * row * per_code, bool), None)
            continue
        before = old.read(name, begin * row, end * row)
        yield _compare(name, (old, new), (before, after), (begin, end), serve)


def _codes_per_element(name: str, form: Form) -> int:
    """Weights in one element of the tensor: two fp4 codes in a byte, eight int4 codes in an int32."""
    if not name.endswith("weight_packed"):
        return 1
    return {torch.uint8: 2, torch.int32: 8}.get(form.dtype, 1)


def _served(tensor: torch.Tensor, serve: torch.dtype | None) -> torch.Tensor:
    return tensor.to(serve) if serve is not None and tensor.dtype in (torch.float32, torch.float64) else tensor


def _bits(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype in BITS:
        return integer_view(tensor)
    return raw_bytes(tensor).view(f"u{tensor.element_size()}")


def _compare(
    name: str,
    sources: tuple[Source, Source],
    tensors: tuple[torch.Tensor, torch.Tensor],
    rows: tuple[int, int],
    serve: torch.dtype | None,
) -> Piece:
    form = sources[0].forms[name]
    if _codes_per_element(name, form) > 1:
        return _compare_codes(name, sources, tensors, rows)
    before, after = tensors
    served = _served(before, serve), _served(after, serve)
    changed = _bits(served[0]) != _bits(served[1])
    values = None
    if form.dtype.is_floating_point and form.dtype in BITS and not is_scale(name):
        width = cell_widths(served[0])
        floats = [tensor.float().numpy() for tensor in tensors]
        scales = [_fp8_scales(source, name, form, rows) for source in sources]
        if scales[0] is not None and scales[1] is not None:
            floats = [f * s for f, s in zip(floats, scales, strict=True)]
            width = width * scales[0]
        values = floats[0], floats[1], width
    return Piece(name, served[0], served[1], changed, values)


def cell_widths(tensor: torch.Tensor) -> np.ndarray:
    """fp32 [n]: distance of neighbouring values of the tensor's dtype at each of its values."""
    info = torch.finfo(tensor.dtype)
    magnitude = np.maximum(np.abs(tensor.float().numpy()), np.float32(max(info.tiny, 2.0**-126)))
    return (magnitude.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32) * np.float32(info.eps)


def _fp8_scales(source: Source, name: str, form: Form, rows: tuple[int, int]) -> np.ndarray | None:
    """fp32 [n]: the scale of every element of these rows, or None for a tensor without scales."""
    stem = name.removesuffix("weight")
    if form.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or len(form.shape) != 2 or stem == name:
        return None
    begin, end = rows
    shape = torch.Size((end - begin, form.shape[1]))
    blocks = source.forms.get(f"{stem}weight_scale_inv")
    if blocks is not None:
        wide = blocks.shape[-1]
        part = source.read(f"{stem}weight_scale_inv", begin // 128 * wide, -(-end // 128) * wide)
        return fp8.spread_blocks(part.float().reshape(-1, wide), 128, shape).reshape(-1).numpy()
    scale = source.forms.get(f"{stem}weight_scale")
    if scale is None:
        return None
    one = scale.elements == 1
    part = source.read(f"{stem}weight_scale", *((0, 1) if one else (begin, end)))
    return part.float().reshape(-1, 1).expand(shape).reshape(-1).numpy()


def _compare_codes(
    name: str, sources: tuple[Source, Source], tensors: tuple[torch.Tensor, torch.Tensor], rows: tuple[int, int]
) -> Piece:
    form = sources[0].forms[name]
    packed = [tensor.reshape(rows[1] - rows[0], -1) for tensor in tensors]
    unpack = fp4.unpack if form.dtype == torch.uint8 else int4.unpack
    codes = [unpack(tensor) for tensor in packed]
    changed = (codes[0] != codes[1]).reshape(-1).numpy()
    scales = [_group_scales(source, name, form, rows) for source in sources]
    if scales[0] is None or scales[1] is None:
        return Piece(name, tensors[0], tensors[1], changed, None)
    grids = [fp4.grid_values(code) if form.dtype == torch.uint8 else code.float() for code in codes]
    floats = [
        (grid.reshape(*scale.shape, -1) * scale[..., None]).reshape(-1).numpy()
        for grid, scale in zip(grids, scales, strict=True)
        if scale is not None
    ]
    cells = torch.from_numpy(_FP4_CELLS)[codes[0].int()] if form.dtype == torch.uint8 else torch.ones(codes[0].shape)
    width = (cells.reshape(*scales[0].shape, -1) * scales[0][..., None]).reshape(-1).numpy()
    return Piece(name, tensors[0], tensors[1], changed, (floats[0], floats[1], width))


def _group_scales(source: Source, name: str, form: Form, rows: tuple[int, int]) -> torch.Tensor | None:
    """fp32 [rows, groups], or None when the tensor's scales are not there."""
    stem = name.removesuffix("weight_packed")
    scale = source.forms.get(f"{stem}weight_scale")
    if scale is None or len(scale.shape) != 2 or len(form.shape) != 2:
        return None
    groups = scale.shape[1]
    part = source.read(f"{stem}weight_scale", rows[0] * groups, rows[1] * groups).reshape(-1, groups)
    if part.dtype == torch.uint8:
        return fp4.e8m0_values(part)
    if f"{stem}weight_global_scale" in source.forms:
        return part.float() / source.read(f"{stem}weight_global_scale", 0, 1)
    return part.float()
