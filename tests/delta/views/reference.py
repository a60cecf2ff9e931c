"""What views are compared with: compressed-tensors where it is installed (a test dependency), and slow obvious code.

Nothing here shares a line with `sprawl.delta.views`: the slow code rounds by looking for the nearest grid point.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def sample(rows: int, columns: int, seed: int = 0, scale: float = 0.02) -> Tensor:
    """Weights with outliers, exact zeros, -0.0, a group of zeros, tiny values and values on ties of the grids."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * scale
    weight[torch.rand(rows, columns, generator=generator) < 0.01] *= 8
    weight[0, : columns // 2] = 0.0
    weight[1, 0], weight[1, 1], weight[1, 2] = -0.0, 1e-30, -1e-38
    weight[2] = 6.0 * scale * torch.arange(columns).remainder(25).div(24).sub(0.5)  # many exact ties
    return weight


def nearest_e2m1(value: float) -> int:
    """Code of one value: nearest grid point, ties to the even code, sign in bit 3."""
    magnitude = min(abs(value), 6.0)
    distance = [abs(magnitude - point) for point in E2M1]
    best = [code for code in range(8) if distance[code] == min(distance)]
    return next((code for code in best if code % 2 == 0), best[0]) | (8 if value < 0 else 0)


def compressed(weight: Tensor, form: str, shared: list[Tensor] | None = None) -> dict[str, Tensor]:
    """What compressed-tensors stores for `weight` (fp32), by part name. `shared`: matrices under one tensor scale."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments: dict[str, Any] = {
        "float8_e4m3": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "float8_e4m3_channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        "nvfp4": {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "scale_dtype": torch.float8_e4m3fn,
        },
        "int4_g128": {
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": 128,
            "scale_dtype": torch.bfloat16,
        },
        "int4_g32": {
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": torch.bfloat16,
        },
    }[form]
    layout = {"float": {8: "naive-quantized", 4: "nvfp4-pack-quantized"}, "int": {4: "pack-quantized"}}
    name = "mxfp4-pack-quantized" if form == "mxfp4" else layout[arguments["type"]][arguments["num_bits"]]
    args = QuantizationArgs(**arguments, symmetric=True, dynamic=False)
    if form == "float8_e4m3":
        low, high = weight.amin(), weight.amax()
    elif form == "float8_e4m3_channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        grouped = weight.unflatten(1, (-1, arguments["group_size"]))
        low, high = grouped.amin(2), grouped.amax(2)
    state: dict[str, Tensor] = {"weight": weight}
    global_scale = None
    if form == "nvfp4":
        every = torch.cat([t.flatten() for t in (shared or [weight])])
        global_scale = state["weight_global_scale"] = generate_gparam(every.amin(), every.amax())
    state["weight_scale"] = calculate_qparams(low, high, args, global_scale)[0]
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    parts = BaseCompressor.get_value_from_registry(name).compress(state, scheme)
    if form.startswith("int4"):
        parts["weight_scale"] = parts["weight_scale"].to(torch.bfloat16)
    return parts


def slow_fp8(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One scale a tensor: every value to the nearest of the 256 the dtype has, ties to the even code."""
    points = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    limit = torch.finfo(dtype).max
    scale = weight.abs().max() / limit
    out = torch.empty(weight.shape, dtype=torch.uint8)
    for row, column in itertools.product(*map(range, weight.shape)):
        value = (weight[row, column] / scale).item()
        distance = (points - value).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        best = [int(code) for code in (distance == distance.min()).nonzero().flatten()]
        signed = [code for code in best if (code >= 128) == (value < 0 or str(value) == "-0.0")] or best
        out[row, column] = next((code for code in signed if code % 2 == 0), signed[0])
    return out.view(dtype), scale.reshape(1)
