"""The formats a policy can be served in: which dtype, which scales, and what an engine reads about it in config.json.

Sources of the layouts (names, shapes, dtypes, packing order, arithmetic):
- compressed-tensors 0.20 (https://github.com/vllm-project/compressed-tensors), which vLLM and SGLang load:
  `naive-quantized` (fp8 with a scale a tensor or a channel), `nvfp4-pack-quantized`, `mxfp4-pack-quantized`,
  `pack-quantized` (int4).
- Hugging Face transformers, `quant_method: fp8` (fine-grained fp8, DeepSeek-V3's layout): `weight_scale_inv`, one
  scale a 128 x 128 block.
- The element formats are those of the OCP Microscaling specification 1.0 (E2M1, E8M0) and OCP FP8 (E4M3, E5M2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sprawl.errors import SprawlError

Kind = Literal["plain", "fp8_scaled", "fp8_block", "nvfp4", "mxfp4", "int4"]


@dataclass(frozen=True)
class Format:
    """A served format.

    `dtype`: of plain tensors, of the fp8 weights, else of the packed ones. `mantissa`: explicit mantissa bits of an
    element; the visibility floor of a value theta is about |theta| / 2**(mantissa + 1), None where elements are
    integers of a shared scale. `group`: elements (or rows and columns of a block) that share a scale, 0 for none.
    """

    name: str
    kind: Kind
    dtype: torch.dtype
    bits: int
    mantissa: int | None
    group: int = 0
    channel: bool = False
    source: str = "Hugging Face"

    @property
    def quantized(self) -> bool:
        return self.kind != "plain"


_CT = "compressed-tensors"
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format("bfloat16", "plain", torch.bfloat16, 16, 7),
        Format("float16", "plain", torch.float16, 16, 10),
        Format("float8_e4m3", "fp8_scaled", _E4M3, 8, 3, source=_CT),
        Format("float8_e4m3_channel", "fp8_scaled", _E4M3, 8, 3, channel=True, source=_CT),
        Format("float8_e4m3_block", "fp8_block", _E4M3, 8, 3, group=128, source="transformers fine-grained fp8"),
        Format("float8_e5m2", "fp8_scaled", _E5M2, 8, 2, source="layout of float8_e4m3"),
        Format("float8_e5m2_block", "fp8_block", _E5M2, 8, 2, group=128, source="layout of float8_e4m3_block"),
        Format("mxfp4", "mxfp4", torch.uint8, 4, 1, group=32, source=_CT),
        Format("nvfp4", "nvfp4", torch.uint8, 4, 1, group=16, source=_CT),
        Format("int4_g128", "int4", torch.int32, 4, None, group=128, source=_CT),
        Format("int4_g32", "int4", torch.int32, 4, None, group=32, source=_CT),
    )
}
"""By name. Engines load all but e5m2 weights with scales, which no release of vLLM or SGLang is known to take."""


def find_format(name: str) -> Format:
    """Raises SprawlError naming the formats there are."""
    if name not in FORMATS:
        raise SprawlError(f"no served format {name!r}", f"one of {', '.join(FORMATS)}")
    return FORMATS[name]


# Kept in bf16 by every recipe of llm-compressor and of the models published in these formats: embeddings, the output
# head and MoE routers; and whatever is no matrix.
_KEPT = re.compile(r"(^|\.)(embed_tokens|wte|wpe|embed_out|lm_head|router|gate)\.weight$")


def is_quantized_weight(name: str, shape: Iterable[int]) -> bool:
    """Whether a scaled format quantises this tensor: the matrix of a linear layer that is no head and no router."""
    return len(tuple(shape)) == 2 and name.endswith(".weight") and _KEPT.search(name) is None


def quantization_config(format: Format, names: Iterable[str]) -> dict[str, Any] | None:
    """What belongs under `quantization_config` in config.json for a view whose masters have these `names`.

    None for plain formats. Raises SprawlError for e5m2, which engines do not load with scales.
    """
    if not format.quantized:
        return None
    if format.dtype == _E5M2:
        raise SprawlError(f"{format.name} has no engine configuration", "serve float8_e4m3 or float8_e4m3_block")
    kept = sorted(name.removesuffix(".weight") for name in names if _KEPT.search(name)) or ["lm_head"]
    if format.kind == "fp8_block":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [format.group, format.group],
            "modules_to_not_convert": kept,
        }
    weights: dict[str, Any] = {"num_bits": format.bits, "symmetric": True, "dynamic": False}
    weights["type"] = "int" if format.kind == "int4" else "float"
    if format.kind == "fp8_scaled":
        weights["strategy"] = "channel" if format.channel else "tensor"
    else:
        weights |= {"strategy": "tensor_group" if format.kind == "nvfp4" else "group", "group_size": format.group}
    scale = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8", "int4": "torch.bfloat16"}.get(format.kind)
    if scale:
        weights["scale_dtype"] = scale
    layout = {
        "fp8_scaled": "naive-quantized",
        "nvfp4": "nvfp4-pack-quantized",
        "mxfp4": "mxfp4-pack-quantized",
        "int4": "pack-quantized",
    }[format.kind]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": kept,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
