"""Served views, bit for bit against reference implementations."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sprawl.delta.codec import apply, decode, encode
from sprawl.delta.state import clone_state, root_digest, served_view, tensor_digests
from sprawl.delta.views import FORMATS, dense_view, make_view
from sprawl.delta.views.fp4 import GRID, codes, e8m0_values, grid_values
from sprawl.errors import IntegrityError, SprawlError
from tests.delta.views.reference import compressed, nearest_e2m1, sample, slow_fp8

LAYER = "model.layers.0.mlp.down_proj."
COMPRESSED = ("float8_e4m3", "float8_e4m3_channel", "mxfp4", "nvfp4", "int4_g128", "int4_g32")
SCALED = [name for name, form in FORMATS.items() if form.quantized]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


@pytest.mark.parametrize("form", COMPRESSED)
@pytest.mark.parametrize("scale", [0.02, 30.0, 1e-12])
def test_bit_exact_against_compressed_tensors(form: str, scale: float) -> None:
    pytest.importorskip("compressed_tensors", reason="the reference of these layouts")
    weight = sample(24, 256, scale=scale)
    expected = compressed(weight.clone(), form)
    view = make_view({f"{LAYER}weight": weight}, form)
    assert {name.removeprefix(LAYER) for name in view} == expected.keys()
    for part, tensor in expected.items():
        assert same_bits(view[LAYER + part], tensor), part


def test_fused_matrices_share_the_tensor_scale_of_nvfp4() -> None:
    pytest.importorskip("compressed_tensors", reason="the reference of these layouts")
    names = [f"model.layers.3.self_attn.{p}_proj.weight" for p in "qkvo"]
    masters = {name: sample(16, 64, seed, 0.01 * (seed + 1)) for seed, name in enumerate(names)}
    view = make_view(masters, "nvfp4")
    for name in names:
        shared = [masters[n] for n in names[:3]] if name != names[3] else None
        for part, tensor in compressed(masters[name].clone(), "nvfp4", shared).items():
            assert same_bits(view[name.removesuffix("weight") + part], tensor), (name, part)


def test_block_fp8_is_bit_exact_against_transformers() -> None:
    from types import SimpleNamespace

    fine = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="the reference of this layout")
    weight = sample(256, 384)
    weight[:128, :128] = 0.0
    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    expected = fine.Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({f"{LAYER}weight": weight})
    view = make_view({f"{LAYER}weight": weight}, "float8_e4m3_block")
    assert view.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(view[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_against_slow_obvious_rounding(dtype: torch.dtype) -> None:
    weight = sample(6, 40)
    form = "float8_e4m3" if dtype == torch.float8_e4m3fn else "float8_e5m2"
    view = make_view({f"{LAYER}weight": weight}, form)
    expected, scale = slow_fp8(weight, dtype)
    assert same_bits(view[f"{LAYER}weight_scale"], scale)
    assert same_bits(view[f"{LAYER}weight"], expected)


@pytest.mark.parametrize("form", ["float8_e4m3_block", "float8_e5m2_block"])
def test_blocks_at_the_edge_have_their_own_scale(form: str) -> None:
    weight = sample(130, 200)
    weight[128:] *= 64
    view = make_view({f"{LAYER}weight": weight}, form)
    scales = view[f"{LAYER}weight_scale_inv"]
    limit = torch.finfo(FORMATS[form].dtype).max
    assert scales.shape == (2, 2)
    for row, rows in enumerate((slice(0, 128), slice(128, 130))):
        for column, columns in enumerate((slice(0, 128), slice(128, 200))):
            amax = weight[rows, columns].abs().max()
            assert scales[row, column].item() == pytest.approx((amax / limit).item(), rel=1e-6)
    worst = ((dense_view(view)[f"{LAYER}weight"] - weight).abs() / weight.abs().clamp(min=1e-4)).max()
    assert worst < (0.07 if "e4m3" in form else 0.13), "half an ulp, scaled"


@settings(max_examples=300, deadline=None)
@given(st.floats(width=32, allow_nan=False))
def test_codes_against_the_nearest_grid_point(value: float) -> None:
    assert int(codes(torch.tensor([value]))[0]) == nearest_e2m1(value)


def test_every_code_comes_back() -> None:
    every = torch.arange(16, dtype=torch.uint8)
    values = grid_values(every)
    assert [abs(v) for v in values.tolist()] == [*GRID, *GRID]
    assert codes(values)[1:8].tolist() == list(range(1, 8))
    assert codes(values)[9:].tolist() == list(range(9, 16))
    exponents = torch.arange(255, dtype=torch.uint8)
    assert e8m0_values(exponents).double().tolist() == [2.0 ** (e - 127) for e in range(255)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_plain_views_are_torch_casts_for_every_bit_pattern(dtype: str, bits: int) -> None:
    master = torch.tensor(struct.unpack("<f", struct.pack("<I", bits))[0])
    assert same_bits(served_view({"w": master}, dtype)["w"].reshape(1), master.to(getattr(torch, dtype)).reshape(1))


@pytest.mark.parametrize("form", SCALED)
def test_only_linear_layers_are_scaled_and_the_rest_is_bf16(form: str) -> None:
    kept = {
        "model.embed_tokens.weight": sample(8, 128),
        "lm_head.weight": sample(8, 128, 1),
        "model.norm.weight": torch.ones(128),
        "model.layers.0.mlp.gate.weight": sample(4, 128, 2),
        f"{LAYER}bias": torch.randn(8),
    }
    view = make_view({**kept, f"{LAYER}weight": sample(8, 128, 3), "ids": torch.arange(3)}, form)
    for name, tensor in kept.items():
        assert same_bits(view[name], tensor.bfloat16()), name
    assert same_bits(view["ids"], torch.arange(3))
    assert view.keys() > kept.keys() | {"ids"}
    assert sum(t.numel() * t.element_size() for n, t in view.items() if n.startswith(f"{LAYER}weight")) < 8 * 128 * 1.2


@pytest.mark.parametrize("form", SCALED)
def test_a_dense_view_is_close_to_the_masters(form: str) -> None:
    masters = {f"{LAYER}weight": sample(128, 256), "model.norm.weight": torch.ones(4)}
    view = make_view(masters, form)
    dense = dense_view(view)
    assert dense.keys() == masters.keys()
    error = (dense[f"{LAYER}weight"] - masters[f"{LAYER}weight"]).square().mean().sqrt()
    assert error / masters[f"{LAYER}weight"].square().mean().sqrt() < {8: 0.06, 4: 0.3}[FORMATS[form].bits]


@pytest.mark.parametrize("form", list(FORMATS))
def test_consecutive_views_travel_as_deltas(form: str) -> None:
    """The codec rebuilds every part of every format: packed codes, scales, shapes."""
    masters = {f"{LAYER}weight": sample(64, 256), "model.norm.weight": torch.ones(64)}
    moved = {
        name: t + 1e-4 * torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) for name, t in masters.items()
    }
    old, new = make_view(masters, form), make_view(moved, form)
    state = clone_state(old)
    blob = encode(old, new).blob
    apply(state, decode(state, blob))
    assert root_digest(tensor_digests(state)) == root_digest(tensor_digests(new))


def test_views_share_no_memory_with_masters() -> None:
    masters = {"model.norm.weight": torch.ones(4).bfloat16(), "ids": torch.arange(3), "empty": torch.empty(0, 4)}
    view = make_view(masters, "bfloat16")
    masters["model.norm.weight"].zero_()
    masters["ids"].zero_()
    assert view["model.norm.weight"].tolist() == [1.0] * 4
    assert view["ids"].tolist() == [0, 1, 2]
    assert view["empty"].shape == (0, 4)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "int4_g32"])
def test_a_width_that_does_not_fit_is_named(form: str) -> None:
    with pytest.raises(SprawlError, match=rf"{LAYER}weight has 40 columns, {form} needs a multiple"):
        make_view({f"{LAYER}weight": sample(4, 40)}, form)


@pytest.mark.parametrize("form", SCALED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_without_a_scale_are_refused(form: str, bad: float) -> None:
    weight = sample(8, 128)
    weight[3, 5] = bad
    with pytest.raises(SprawlError, match=f"{LAYER}weight holds weights that are not finite"):
        make_view({f"{LAYER}weight": weight}, form)


def test_an_unknown_format_is_named_with_those_there_are() -> None:
    with pytest.raises(SprawlError, match=r"no served format 'fp9'.*nvfp4"):
        make_view({}, "fp9")


@pytest.mark.parametrize("form", SCALED)
def test_a_view_with_a_part_missing_is_refused(form: str) -> None:
    view = make_view({f"{LAYER}weight": sample(8, 128)}, form)
    for name in view:
        if name.endswith("weight_shape"):
            continue
        with pytest.raises(IntegrityError, match=LAYER):
            dense_view({other: tensor for other, tensor in view.items() if other != name})
