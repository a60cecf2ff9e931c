"""What a decoder-only policy looks like, read from a Hugging Face `config.json` (Qwen2, Qwen3 and Llama families)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sprawl.errors import ConfigError

FAMILIES = {"qwen2", "qwen3", "llama"}
_NEEDED = ("num_attention_heads", "hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers")


@dataclass(frozen=True)
class Architecture:
    """Shapes and switches of one model. `hidden` is H of the boundary codec."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    tied: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    max_positions: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Architecture:
        """Read `config.json`. Raises ConfigError for a family or a feature that is not supported."""
        if not isinstance(config, Mapping):
            raise ConfigError("config.json of the model is no mapping of settings", "give the one that came with it")
        family = str(config.get("model_type", "?"))
        if family not in FAMILIES:
            raise ConfigError(f"model_type {family!r} is not supported", f"supported: {', '.join(sorted(FAMILIES))}")
        # transformers 5 nests the rotary settings, 4 keeps them flat.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ConfigError(f"rope type {rope_type!r} is not supported", "use a model with default rotary embeddings")
        if config.get("use_sliding_window"):
            raise ConfigError("sliding-window attention is not supported", "set use_sliding_window to false")
        missing = [name for name in _NEEDED if not isinstance(config.get(name), int)]
        if missing:
            raise ConfigError(
                f"config.json of the model has no number {', '.join(missing)}", "give the one that came with it"
            )
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return cls(
            family=family,
            vocab=int(config["vocab_size"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bool(config.get("attention_bias", False)),
            output_bias=family != "qwen2" and bool(config.get("attention_bias", False)),
            qk_norm=family == "qwen3",
            max_positions=int(config.get("max_position_embeddings", 2048)),
        )

    def split(self, stages: int, sizes: list[int] | None = None) -> list[range]:
        """Layers of each stage: `sizes` if given, else as even as possible with the larger stages first
        (28 layers over 8 stages: 4,4,4,4,3,3,3,3, the report's split). Raises ConfigError when it does not fit."""
        if sizes is None:
            if stages > self.layers:
                raise ConfigError(f"policy.stages={stages} but the model has only {self.layers} layers")
            quotient, rest = divmod(self.layers, stages)
            sizes = [quotient + 1] * rest + [quotient] * (stages - rest)
        if sum(sizes) != self.layers:
            raise ConfigError(f"policy.split sums to {sum(sizes)} but the model has {self.layers} layers")
        ranges, start = [], 0
        for size in sizes:
            ranges.append(range(start, start + size))
            start += size
        return ranges
