"""What has to be loaded together."""

from __future__ import annotations

import pytest

from sprawl.policy import Architecture, Decoder
from sprawl.rollout.vllm.groups import close, module_of
from tests.vllm.bench import config

NAMES = list(Decoder(Architecture.from_hf(config(tied=False))).state_dict())
LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("model.layers.3.self_attn.k_proj.bias", "model.layers.3.self_attn.qkv_proj"),
        ("model.layers.3.self_attn.o_proj.weight", "model.layers.3.self_attn.o_proj"),
        ("model.layers.3.mlp.up_proj.weight_scale_inv", "model.layers.3.mlp.gate_up_proj"),
        ("model.layers.3.mlp.experts.17.up_proj.weight", "model.layers.3.mlp.experts"),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", "model.layers.3.mlp.shared_expert.gate_up_proj"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("scale", ""),
    ],
)
def test_module_of(name: str, module: str) -> None:
    assert module_of(name) == module


@pytest.mark.parametrize("part", ["q_proj.weight", "k_proj.bias", "v_proj.weight"])
def test_one_part_of_the_attention_brings_all_of_it(part: str) -> None:
    parts = [f"{LAYER}self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")]
    assert close([f"{LAYER}self_attn.{part}"], NAMES) == sorted(parts)


def test_one_part_of_the_mlp_brings_both_and_no_other_layer() -> None:
    assert close([f"{LAYER}mlp.up_proj.weight", "model.norm.weight"], NAMES) == [
        f"{LAYER}mlp.gate_proj.weight",
        f"{LAYER}mlp.up_proj.weight",
        "model.norm.weight",
    ]


def test_every_expert_comes_when_one_changed() -> None:
    names = [f"{LAYER}mlp.experts.{i}.{p}_proj.weight" for i in range(3) for p in ("gate", "up", "down")]
    assert close(names[:1], [*names, "model.norm.weight"]) == sorted(names)


def test_a_model_may_name_its_own_groups() -> None:
    fused = {"in_proj": ("in_proj_ba", "in_proj_qkvz")}
    names = ["a.in_proj_ba.weight", "a.in_proj_qkvz.weight", "a.q_proj.weight", "a.k_proj.weight"]
    assert close(names[:1], names, fused) == names[:2]
    assert close(["a.q_proj.weight"], names, fused) == ["a.q_proj.weight"]


def test_nothing_all_and_unknown() -> None:
    assert close([], NAMES) == []
    assert close(NAMES, NAMES) == sorted(NAMES)
    with pytest.raises(KeyError, match="lm_tail"):
        close(["lm_tail.weight"], NAMES)
