"""Master weights in, served view out; and back, for who computes with a view without low-precision kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from sprawl.delta.views import fp4, fp8, int4
from sprawl.delta.views.formats import Format, find_format, is_quantized_weight
from sprawl.errors import IntegrityError, SprawlError

State = dict[str, Tensor]

# Layers that engines fuse into one matrix: they share nvfp4's tensor scale, or the fused layer would lose accuracy.
_FUSED = re.compile(r"(?P<parent>.*\.)(?:(?P<qkv>[qkv]_proj)|(?P<up>gate_proj|up_proj|w1|w3))\.weight$")


def make_view(masters: Mapping[str, Tensor], format: str | Format) -> State:
    """The weights as an engine serves them: CPU, contiguous, no memory shared with `masters`.

    Plain formats round every floating tensor to nearest even and keep other dtypes. Scaled formats quantise the
    matrices of linear layers (`formats.is_quantized_weight`) and keep everything else in bf16. `masters` may live on
    any device (the work is done there) and in any floating dtype (the arithmetic is fp32). Peak extra memory: the view
    and about five fp32 copies of the largest tensor.

    Raises SprawlError for an unknown format, and naming the tensor when its width does not fit the format's groups or
    when a weight that needs a scale is not finite.
    """
    form = find_format(format) if isinstance(format, str) else format
    scales = _global_scales(masters) if form.kind == "nvfp4" else {}
    view: State = {}
    for name, master in masters.items():
        tensor = master.detach()
        if form.quantized and tensor.is_floating_point() and is_quantized_weight(name, tensor.shape):
            _check(name, tensor, form)
            parts = _quantize(name.removesuffix("weight"), tensor, form, scales.get(name))
        else:
            cast = torch.bfloat16 if form.quantized else form.dtype
            parts = {name: tensor.to(cast) if tensor.is_floating_point() else tensor}
        for part, value in parts.items():
            copy = value.data_ptr() == tensor.data_ptr()
            view[part] = value.to(device="cpu", copy=copy).contiguous()
    return view


def _check(name: str, tensor: Tensor, form: Format) -> None:
    if form.kind in ("nvfp4", "mxfp4", "int4") and tensor.shape[1] % form.group:
        raise SprawlError(
            f"{name} has {tensor.shape[1]} columns, {form.name} needs a multiple of {form.group}",
            "serve it in another format",
        )
    if not bool(torch.isfinite(tensor).all()):
        raise SprawlError(f"{name} holds weights that are not finite, {form.name} cannot scale them")


def _quantize(prefix: str, tensor: Tensor, form: Format, global_scale: Tensor | None) -> State:
    """The tensors that stand for one matrix; `prefix` is the layer's name with its dot."""
    if form.kind == "fp8_scaled":
        weight, scale = fp8.quantize_scaled(tensor, form.dtype, channel=form.channel)
        return {f"{prefix}weight": weight, f"{prefix}weight_scale": scale}
    if form.kind == "fp8_block":
        weight, scale = fp8.quantize_block(tensor, form.dtype, form.group)
        return {f"{prefix}weight": weight, f"{prefix}weight_scale_inv": scale}
    if form.kind == "int4":
        weight, scale = int4.quantize_int4(tensor, form.group)
        shape = torch.tensor(tensor.shape, dtype=torch.int64)
        return {f"{prefix}weight_packed": weight, f"{prefix}weight_scale": scale, f"{prefix}weight_shape": shape}
    if global_scale is None:
        weight, scale = fp4.quantize_mxfp4(tensor, form.group)
        return {f"{prefix}weight_packed": weight, f"{prefix}weight_scale": scale}
    weight, scale = fp4.quantize_nvfp4(tensor, global_scale, form.group)
    return {
        f"{prefix}weight_packed": weight,
        f"{prefix}weight_scale": scale,
        f"{prefix}weight_global_scale": global_scale.clone(),
    }


def _global_scales(masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """nvfp4's tensor scale of every quantised matrix, shared by the matrices that engines fuse."""
    groups: dict[str, list[str]] = {}
    for name, tensor in masters.items():
        if tensor.is_floating_point() and is_quantized_weight(name, tensor.shape):
            groups.setdefault(_fused_name(name), []).append(name)
    scales = {}
    for names in groups.values():
        scale = fp4.nvfp4_global_scale([masters[name].detach() for name in names])
        scales.update(dict.fromkeys(names, scale))
    return scales


def _fused_name(name: str) -> str:
    match = _FUSED.match(name)
    if match is None:
        return name
    return match["parent"] + ("qkv" if match["qkv"] else "gate_up")


def dense_view(state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> State:
    """The masters' names and shapes again, with the values that the view stands for, rounded once, to `dtype`.

    The format is read off the names and dtypes, so plain states pass through (converted to `dtype` where floating).
    Raises IntegrityError naming the tensor when a part of a quantised matrix is missing.
    """
    dense: State = {}
    for name, tensor in state.items():
        prefix, _, part = name.rpartition(".")
        prefix = f"{prefix}." if prefix else ""
        if part in ("weight_scale", "weight_scale_inv", "weight_global_scale", "weight_shape"):
            _part(state, prefix, "weight" if f"{prefix}weight" in state else "weight_packed", name)
        elif part == "weight_packed":
            dense[f"{prefix}weight"] = _dequantize_packed(state, prefix, name).to(dtype)
        elif part == "weight" and tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            dense[name] = _dequantize_fp8(state, prefix, name).to(dtype)
        else:
            dense[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return dense


def _part(state: Mapping[str, Tensor], prefix: str, part: str, of: str) -> Tensor:
    tensor = state.get(f"{prefix}{part}")
    if tensor is None:
        raise IntegrityError(f"{of} comes without {prefix}{part}")
    return tensor


def _dequantize_packed(state: Mapping[str, Tensor], prefix: str, name: str) -> Tensor:
    packed, scale = state[name], _part(state, prefix, "weight_scale", name)
    if packed.dtype == torch.int32:
        return int4.dequantize_int4(packed, scale)
    if scale.dtype == torch.uint8:
        return fp4.dequantize_mxfp4(packed, scale)
    return fp4.dequantize_nvfp4(packed, scale, _part(state, prefix, "weight_global_scale", name))


def _dequantize_fp8(state: Mapping[str, Tensor], prefix: str, name: str) -> Tensor:
    if (scale_inv := state.get(f"{prefix}weight_scale_inv")) is not None:
        return fp8.dequantize_block(state[name], scale_inv, 128)
    return fp8.dequantize_scaled(state[name], _part(state, prefix, "weight_scale", name))
