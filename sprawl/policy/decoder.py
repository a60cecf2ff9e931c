"""A decoder-only transformer whose layers can be run one at a time, so that a pipeline stage is a slice of it.

Parameter names and shapes are those of the Hugging Face checkpoint, and the arithmetic follows the order of
operations of `transformers`, so that the fp32 logits are equal to its own (tests/policy/test_parity.py).
Sequences are right-padded: with causal attention no real token ever attends to padding, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sprawl.errors import IntegrityError
from sprawl.policy.architecture import Architecture


class RowAttention(Protocol):
    """Attention over rows that belong to sequences of their own, each at its own position: who implements it knows
    which, and keeps what is behind them."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[rows, heads, head_dim] and two of [rows, kv_heads, head_dim], before the rotary embedding ->
        [rows, heads, head_dim]."""


@dataclass(frozen=True)
class Rotary:
    """cos/sin of the positions of a batch, [T, head_dim]."""

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos + rotated * self.sin


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        query, key = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        self.q_proj = nn.Linear(arch.hidden, query, bias=arch.qkv_bias)
        self.k_proj = nn.Linear(arch.hidden, key, bias=arch.qkv_bias)
        self.v_proj = nn.Linear(arch.hidden, key, bias=arch.qkv_bias)
        self.o_proj = nn.Linear(query, arch.hidden, bias=arch.output_bias)
        if arch.qk_norm:
            self.q_norm = RmsNorm(arch.head_dim, arch.norm_eps)
            self.k_norm = RmsNorm(arch.head_dim, arch.norm_eps)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (tensor.transpose(1, 2) for tensor in self._project(x))
        query, key = rotary.apply(query), rotary.apply(key)
        groups = self.arch.heads // self.arch.kv_heads
        if groups > 1:
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))

    def run_rows(self, x: Tensor, layer: int, attention: RowAttention) -> Tensor:
        """[rows, H] -> [rows, H]."""
        return self.o_proj(attention(layer, *self._project(x)).flatten(1))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., H] -> query [..., heads, head_dim], key and value [..., kv_heads, head_dim]."""
        shape = (*x.shape[:-1], -1, self.arch.head_dim)
        query, key, value = (proj(x).view(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.arch.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value


class Mlp(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(arch.hidden, arch.intermediate, bias=False)
        self.up_proj = nn.Linear(arch.hidden, arch.intermediate, bias=False)
        self.down_proj = nn.Linear(arch.intermediate, arch.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(arch.hidden, arch.norm_eps)
        self.self_attn = Attention(arch)
        self.post_attention_layernorm = RmsNorm(arch.hidden, arch.norm_eps)
        self.mlp = Mlp(arch)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))

    def run_rows(self, x: Tensor, index: int, attention: RowAttention) -> Tensor:
        """[rows, H] -> [rows, H]."""
        x = x + self.self_attn.run_rows(self.input_layernorm(x), index, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Everything below the head; its own module so that parameter names carry the checkpoint's `model.` prefix."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab, arch.hidden)
        self.layers = nn.ModuleList(Layer(arch) for _ in range(arch.layers))
        self.norm = RmsNorm(arch.hidden, arch.norm_eps)


class Decoder(nn.Module):
    """The whole model. With tied embeddings there is no `lm_head.weight`, here as in the checkpoint."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.model = Trunk(arch)
        if not arch.tied:
            self.lm_head = nn.Linear(arch.hidden, arch.vocab, bias=False)
        # Computed as in the reference implementation; a plain attribute, because a buffer would follow .to(bfloat16).
        exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / arch.head_dim
        self.inverse_frequency = 1.0 / (arch.rope_theta**exponents)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def rotary(self, start: int, length: int, dtype: torch.dtype) -> Rotary:
        positions = torch.arange(start, start + length, dtype=torch.float32)
        angles = torch.outer(positions, self.inverse_frequency)
        angles = torch.cat((angles, angles), dim=-1)
        return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))

    def embed(self, input_ids: Tensor) -> Tensor:
        """[B, T] int64 -> [B, T, H]."""
        return self.model.embed_tokens(input_ids)

    def run_layers(self, x: Tensor, layers: range, rotary: Rotary, *, recompute: bool = False) -> Tensor:
        """Apply a slice of the layers to [B, T, H]. With `recompute` the backward pass runs each layer once more
        instead of remembering what is inside it; the gradient is the same to the bit."""
        for index in layers:
            layer = self.model.layers[index]
            if recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, rotary, use_reentrant=False)
            else:
                x = layer(x, rotary)
        return x

    def run_rows(self, input_ids: Tensor, attention: RowAttention) -> Tensor:
        """One token of each of [rows] int64, of whatever sequences -> what goes into `head`, [rows, H]."""
        x = self.embed(input_ids)
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            x = layer.run_rows(x, index, attention)
        return x

    def head(self, x: Tensor) -> Tensor:
        """Final norm and unembedding: [..., H] -> fp32 logits [..., V]."""
        x = self.model.norm(x)
        weight = self.model.embed_tokens.weight if self.arch.tied else self.lm_head.weight
        return F.linear(x, weight).float()

    def forward(self, input_ids: Tensor) -> Tensor:
        """[B, T] int64 -> fp32 logits [B, T, V]."""
        x = self.embed(input_ids)
        rotary = self.rotary(0, input_ids.shape[1], x.dtype)
        return self.head(self.run_layers(x, range(self.arch.layers), rotary))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by checkpoint name."""
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    @torch.no_grad()
    def load_served(self, state: Mapping[str, Tensor], compute_dtype: torch.dtype) -> None:
        """Take the weights of a served view, converted to `compute_dtype` (bf16 -> fp32 is exact).

        Values are copied, so later changes of `state` are not seen. Raises IntegrityError when a name is missing,
        unknown, or has another shape; nothing was taken then.
        """
        self.to(compute_dtype)
        parameters = dict(self.named_parameters())
        missing, unknown = parameters.keys() - state.keys(), state.keys() - parameters.keys()
        if missing or unknown:
            raise IntegrityError(
                "served view does not fit the architecture: "
                f"missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}"
            )
        for name, parameter in parameters.items():
            if parameter.shape != state[name].shape:
                raise IntegrityError(f"{name}: shape {tuple(state[name].shape)}, model has {tuple(parameter.shape)}")
        for name, parameter in parameters.items():
            parameter.copy_(state[name])
