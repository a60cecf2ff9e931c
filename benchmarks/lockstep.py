"""The other way to decode, for comparison: one group at a time, its rows in lockstep through one growing cache.

What the embedded engine did before it batched continuously: the prompt is read once and copied to n rows, rows that end
stay in the batch, the next request waits until all rows of this one have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sprawl.policy import Decoder
from sprawl.policy.decoder import Rotary
from sprawl.rollout.sampling import uniforms


@dataclass
class Cache:
    """Keys and values of rows of equal length, one preallocated [rows, kv_heads, positions, head_dim] a layer."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int = field(default=0)


def new_cache(decoder: Decoder, rows: int, positions: int) -> Cache:
    arch = decoder.arch
    shape = (rows, arch.kv_heads, positions, arch.head_dim)
    keys, values = ([torch.zeros(shape, dtype=decoder.dtype) for _ in range(arch.layers)] for _ in range(2))
    return Cache(keys, values)


def forward(decoder: Decoder, input_ids: Tensor, cache: Cache) -> Tensor:
    """[rows, T] -> fp32 logits of the last position, [rows, V]; the T positions are appended to the cache."""
    arch, past, length = decoder.arch, cache.length, input_ids.shape[1]
    x = decoder.embed(input_ids)
    rotary = decoder.rotary(past, length, x.dtype)
    for index, layer in enumerate(decoder.model.layers):
        normed = layer.input_layernorm(x)
        x = x + _attention(layer.self_attn, normed, rotary, cache.keys[index], cache.values[index], past)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    cache.length = past + length
    assert cache.length <= arch.max_positions
    return decoder.head(x[:, -1])


def _attention(
    attention: torch.nn.Module, x: Tensor, rotary: Rotary, keys: Tensor, values: Tensor, past: int
) -> Tensor:
    """[rows, T, H] -> [rows, T, H], seeing `past` positions and, among T > 1 new ones, only from an empty cache."""
    rows, length, _ = x.shape
    arch, end = attention.arch, past + length
    shape = (rows, length, -1, arch.head_dim)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (proj(x).view(shape) for proj in projections)
    if arch.qk_norm:
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    keys[:, :, past:end] = rotary.apply(key)
    values[:, :, past:end] = value
    groups = arch.heads // arch.kv_heads
    key, value = (tensor[:, :, :end].repeat_interleave(groups, dim=1) for tensor in (keys, values))
    out = F.scaled_dot_product_attention(rotary.apply(query), key, value, is_causal=length > 1)
    return attention.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


def sample(logits: Tensor, numbers: NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """At temperature 1, with tensor operations in fp64."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    cdf = logprobs.exp().cumsum(dim=-1)
    total = cdf[:, -1]
    targets = torch.minimum(torch.from_numpy(numbers) * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cdf, targets.unsqueeze(-1), right=True)
    return tokens.squeeze(-1).tolist(), logprobs.gather(-1, tokens).squeeze(-1).float().tolist()


@torch.inference_mode()
def generate(decoder: Decoder, prompt: Sequence[int], seeds: Sequence[int], new_tokens: int) -> list[list[int]]:
    """Token ids of `len(seeds)` samples of one prompt."""
    rows = len(seeds)
    cache = new_cache(decoder, 1, len(prompt) + new_tokens)
    logits = forward(decoder, torch.tensor([list(prompt)]), cache).expand(rows, -1)
    for tensors in (cache.keys, cache.values):
        tensors[:] = [tensor.repeat(rows, 1, 1, 1) for tensor in tensors]
    steps: list[list[int]] = []
    for position in range(new_tokens):
        if steps:
            logits = forward(decoder, torch.tensor(steps[-1]).unsqueeze(-1), cache)
        steps.append(sample(logits, uniforms(seeds, position))[0])
    return [list(tokens) for tokens in zip(*steps, strict=True)]
