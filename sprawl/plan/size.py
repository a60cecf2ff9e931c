"""The size of a model, from its configuration alone: parameters by stage, bytes of the served view."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sprawl.policy.architecture import Architecture
from sprawl.policy.decoder import Decoder

# Bits that a weight of a linear layer takes in a served format. A scale a tensor or a channel is not worth counting;
# one for every 128 x 128, 128, 32 or 16 weights is.
BITS = {
    "bfloat16": 16.0,
    "float16": 16.0,
    "float8_e4m3": 8.0,
    "float8_e4m3_channel": 8.0,
    "float8_e4m3_block": 8.0 + 32 / (128 * 128),
    "mxfp4": 4.0 + 8 / 32,
    "nvfp4": 4.0 + 8 / 16,
    "int4_g128": 4.0 + 16 / 128,
    "int4_g32": 4.0 + 16 / 32,
}


@dataclass(frozen=True)
class Size:
    """Parameters. `stages`: held by each stage (tied embeddings by the first and, as a copy, by the last). `linear`: in
    matrices that scaled formats quantise; `kept`: embeddings, head, norms, biases. `kv_bytes`: a token's keys and
    values at two bytes a number."""

    stages: tuple[int, ...]
    stage_layers: tuple[int, ...]
    linear: int
    kept: int
    hidden: int
    intermediate: int
    vocab: int
    kv_bytes: int

    @property
    def parameters(self) -> int:
        return self.linear + self.kept

    def served_bytes(self, served: str) -> int:
        """Bytes of the view that engines get."""
        return round(self.linear * BITS[served] / 8 + self.kept * 2)


def size_of(arch: Architecture, stages: int, split: list[int] | None = None) -> Size:
    """Counted on a model without storage. Raises ConfigError when its layers cannot be split so."""
    ranges = arch.split(stages, split)
    with torch.device("meta"):
        shapes = {name: tensor.numel() for name, tensor in Decoder(arch).named_parameters()}
        matrices = {name for name, tensor in Decoder(arch).named_parameters() if tensor.ndim == 2}
    linear = sum(count for name, count in shapes.items() if name in matrices and ".layers." in name)
    held = [0] * stages
    for name, count in shapes.items():
        held[_stage(name, ranges)] += count
    if arch.tied and stages > 1:
        held[-1] += arch.vocab * arch.hidden
    return Size(
        tuple(held),
        tuple(len(each) for each in ranges),
        linear,
        sum(shapes.values()) - linear,
        arch.hidden,
        arch.intermediate,
        arch.vocab,
        2 * 2 * arch.kv_heads * arch.head_dim * arch.layers,
    )


def _stage(name: str, ranges: list[range]) -> int:
    if ".layers." in name:
        layer = int(name.split(".layers.", 1)[1].split(".", 1)[0])
        return next(stage for stage, layers in enumerate(ranges) if layer in layers)
    return 0 if "embed_tokens" in name else len(ranges) - 1
