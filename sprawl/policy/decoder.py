"""A decoder-only transformer whose layers can be run one at a time, so that a pipeline stage is a slice of it.

Parameter names and shapes are those of the Hugging Face checkpoint, and the arithmetic follows the order of
operations of `transformers`, so that the fp32 logits are equal to its own (tests/policy/test_parity.py).
Sequences are right-padded: with causal attention no real token ever attends to padding, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sprawl.errors import IntegrityError
from sprawl.policy.architecture import Architecture


class KvCache:
    """Keys and values of `rows` sequences of equal length, preallocated for `max_length` positions.

    keys/values: one tensor a layer, [rows, kv_heads, max_length, head_dim]. `length` positions are filled.
    """

    def __init__(self, arch: Architecture, rows: int, max_length: int, dtype: torch.dtype) -> None:
        shape = (rows, arch.kv_heads, max_length, arch.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(arch.layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(arch.layers)]
        self.length = 0

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store T new positions of one layer and return views of everything stored up to them."""
        end = self.length + key.shape[2]
        self.keys[layer][:, :, self.length : end] = key
        self.values[layer][:, :, self.length : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def expand(self, rows: int) -> None:
        """Turn a cache of one row into `rows` copies of it: a prompt is read once, then sampled n times."""
        self.keys = [tensor.repeat(rows, 1, 1, 1) for tensor in self.keys]
        self.values = [tensor.repeat(rows, 1, 1, 1) for tensor in self.values]


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

    def forward(self, x: Tensor, rotary: Rotary, layer: int, cache: KvCache | None) -> Tensor:
        rows, length, _ = x.shape
        shape = (rows, length, -1, self.arch.head_dim)
        query, key, value = (proj(x).view(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.arch.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        query, key = rotary.apply(query), rotary.apply(key)
        past = cache.length if cache is not None else 0
        if cache is not None:
            key, value = cache.append(layer, key, value)
        groups = self.arch.heads // self.arch.kv_heads
        if groups > 1:
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        if past and length > 1:
            # New positions see the whole past and, among themselves, only what came before.
            mask = torch.ones(length, past + length, dtype=torch.bool).tril(past)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


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

    def forward(self, x: Tensor, rotary: Rotary, index: int, cache: KvCache | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, index, cache)
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
        exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).to(torch.float32) / arch.head_dim
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

    def run_layers(self, x: Tensor, layers: range, rotary: Rotary, cache: KvCache | None = None) -> Tensor:
        """Apply a slice of the layers to [B, T, H]."""
        for index in layers:
            x = self.model.layers[index](x, rotary, index, cache)
        return x

    def head(self, x: Tensor) -> Tensor:
        """Final norm and unembedding: [..., H] -> fp32 logits [..., V]."""
        x = self.model.norm(x)
        weight = self.model.embed_tokens.weight if self.arch.tied else self.lm_head.weight
        return F.linear(x, weight).float()

    def forward(self, input_ids: Tensor, cache: KvCache | None = None, *, last_only: bool = False) -> Tensor:
        """[B, T] int64 -> fp32 logits [B, T, V]. With a cache the T positions are appended to it.

        `last_only` gives the last position's logits, [B, V]: the head is the largest matrix of a small model.
        """
        x = self.embed(input_ids)
        rotary = self.rotary(cache.length if cache is not None else 0, input_ids.shape[1], x.dtype)
        x = self.run_layers(x, range(self.arch.layers), rotary, cache)
        if cache is not None:
            cache.length += input_ids.shape[1]
        return self.head(x[:, -1] if last_only else x)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by checkpoint name."""
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    def new_cache(self, rows: int, max_length: int) -> KvCache:
        return KvCache(self.arch, rows, max_length, self.dtype)

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
