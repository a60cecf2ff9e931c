"""Rows computed next to anything have the bits they have alone, and are those of the whole-sequence decoder."""

from __future__ import annotations

import functools
import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sprawl.policy import Architecture, Decoder
from sprawl.rollout.batching import blocks as blocks_module
from sprawl.rollout.batching.blocks import BASE, SIZES, Blocks, Track, cancelling, invariant_sizes, row_sizes
from sprawl.rollout.batching.kernels import exponentials
from sprawl.rollout.batching.pages import PAGE, PagePool, pages_for

FAMILIES = ("qwen2", "qwen3", "llama")


def architecture(family: str = "qwen2", **changes: object) -> Architecture:
    return Architecture.from_hf(
        {
            "model_type": family,
            "vocab_size": 61,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 96,
            **changes,
        }
    )


def random_decoder(arch: Architecture, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(arch).eval()
    generator = torch.Generator().manual_seed(3)
    state = {
        name: (1.0 if "norm" in name else 0.0) + 0.2 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in decoder.named_parameters()
    }
    decoder.load_served(state, dtype)
    return decoder


class Rig:
    """A decoder and a pool; tracks come and go."""

    def __init__(self, arch: Architecture, dtype: torch.dtype = torch.float32, pages: int = 400) -> None:
        self.decoder = random_decoder(arch, dtype)
        self.pool = PagePool(arch, pages)
        self.blocks = Blocks(self.decoder, self.pool, dtype, arch.max_positions)

    def track(self, tokens: list[int]) -> Track:
        return Track(tokens, np.array(self.pool.take(pages_for(len(tokens))), np.int32))

    @torch.inference_mode()
    def alone(self, tokens: list[int]) -> Tensor:
        """Logits after every position, [T, V], one position a block."""
        track = self.track(tokens)
        rows = [self.blocks.logits(self.blocks.hidden([(track, 1)])) for _ in tokens]
        self.pool.give(track.pages.tolist())
        return torch.cat(rows)


@functools.cache
def rig(dtype: torch.dtype = torch.float32) -> Rig:
    return Rig(architecture(), dtype)


@pytest.mark.parametrize(
    "changes", [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"head_dim": 18}], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_rows_compute_what_the_decoder_computes(family: str, changes: dict[str, int]) -> None:
    one = Rig(architecture(family, **changes))
    tokens = torch.randint(61, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = one.decoder(torch.tensor([tokens]))[0]
    torch.testing.assert_close(one.alone(tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=7), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
@torch.inference_mode()
def test_bits_do_not_depend_on_neighbours_nor_on_how_a_sequence_is_cut(
    dtype: torch.dtype, lengths: list[int], seed: int
) -> None:
    one, chance = rig(dtype), Random(seed)
    sequences = [[chance.randrange(61) for _ in range(length)] for length in lengths]
    expected = [one.alone(tokens) for tokens in sequences]
    tracks = [one.track(tokens) for tokens in sequences]
    while open_ones := [at for at, track in enumerate(tracks) if track.done < len(track.tokens)]:
        chance.shuffle(open_ones)
        pieces, room = [], one.blocks.limit
        for at in open_ones[: chance.randint(1, len(open_ones))]:
            count = min(room, chance.randint(1, len(tracks[at].tokens) - tracks[at].done))
            if count:
                pieces.append((at, count))
                room -= count
        logits = one.blocks.logits(one.blocks.hidden([(tracks[at], count) for at, count in pieces]))
        for row, (at, _) in enumerate(pieces):
            assert torch.equal(logits[row], expected[at][tracks[at].done - 1])
    for track in tracks:
        one.pool.give(track.pages.tolist())


@torch.inference_mode()
def test_what_a_page_held_before_does_not_matter() -> None:
    tokens = list(range(37))
    clean = rig().alone(tokens)
    dirty = Rig(architecture())
    dirty.pool.keys.fill(math.nan)
    dirty.pool.values.fill(math.nan)
    assert torch.equal(dirty.alone(tokens), clean)


def test_row_sizes_agree_here_and_include_the_base() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        sizes = row_sizes(architecture(), dtype, torch.get_num_threads())
        assert set(sizes) <= set(SIZES)
        assert BASE in sizes


def test_sizes_that_round_differently_are_not_used() -> None:
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(SIZES[-1], 24, generator=torch.Generator().manual_seed(1))

    def by_count(x: Tensor) -> Tensor:
        return x @ weight if len(x) < 32 else x[:, :12] @ weight[:12] + x[:, 12:] @ weight[12:]

    def by_place(x: Tensor) -> Tensor:
        return x @ weight + torch.arange(len(x)).unsqueeze(1) * 1e-6

    assert invariant_sizes(by_count, rows) == tuple(size for size in SIZES if size < 32)
    assert invariant_sizes(by_place, rows) == ()


@pytest.mark.parametrize("seed", range(5))
def test_another_order_of_additions_is_seen_through_bf16(seed: int) -> None:
    rows, weight = cancelling(24, 32, torch.Generator().manual_seed(seed))
    weight = weight.to(torch.bfloat16).float().T

    def product(x: Tensor) -> Tensor:
        parts = [x[:, at : at + 8].float() @ weight[at : at + 8] for at in range(0, 32, 8)]
        return functools.reduce(torch.add, parts if len(x) < 32 else parts[::-1]).to(torch.bfloat16)

    small = tuple(size for size in SIZES if size < 32)
    assert invariant_sizes(product, rows.to(torch.bfloat16)) == small


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("hidden", [32, 64])
@torch.inference_mode()
def test_small_bf16_models_have_the_same_bits_at_all_their_sizes(hidden: int, heads: int) -> None:
    """Products of few channels, of which a library computes some in another order from some row count on."""
    arch = architecture(hidden_size=hidden, num_key_value_heads=heads)
    layers = random_decoder(arch, torch.bfloat16).model.layers
    rows = torch.randn(5000, hidden, generator=torch.Generator().manual_seed(hidden + heads)).bfloat16()

    def own_value(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).contiguous()

    def one_size(size: int) -> Tensor:
        parts = rows[: len(rows) // size * size].split(size)
        return torch.cat([functools.reduce(lambda x, layer: layer.run_rows(x, 0, own_value), layers, x) for x in parts])

    sizes = row_sizes(arch, torch.bfloat16, torch.get_num_threads())
    expected = one_size(sizes[0])
    for size in sizes[1:]:
        found = one_size(size)
        shared = min(len(found), len(expected))
        assert torch.equal(found[:shared], expected[:shared]), size


@torch.inference_mode()
def test_without_any_good_size_rows_are_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "row_sizes", lambda *_: (1,))
    single = Rig(architecture())
    assert single.blocks.limit == 1
    tokens = [5, 6, 7, 8]
    torch.testing.assert_close(single.alone(tokens), rig().alone(tokens), rtol=1e-4, atol=1e-4)


@given(st.lists(st.floats(-120, 0, width=32), min_size=1, max_size=70))
def test_exponentials(values: list[float]) -> None:
    row = np.array(values, np.float32)
    expected = np.exp(np.maximum(row.astype(np.float64), -87.0))
    bits = np.empty(row.size, np.int32)
    total = exponentials(row, np.float32(0), bits, bits.view(np.float32))
    np.testing.assert_allclose(row, expected, rtol=2e-7)
    assert total == pytest.approx(expected.sum(), rel=1e-6)


def test_pages_are_given_out_once_and_no_more_than_there_are() -> None:
    pool = PagePool(architecture(), 5)
    first, second = pool.take(2), pool.take(3)
    assert sorted(first + second) == list(range(5))
    assert pool.free == 0
    with pytest.raises(IndexError):
        pool.take(1)
    pool.give(second)
    assert pool.take(3) == second  # the warm ones first
    assert pages_for(0) == 0
    assert [pages_for(n) for n in (1, PAGE, PAGE + 1)] == [1, 1, 2]
