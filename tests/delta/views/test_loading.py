"""The layouts as engines' own code reads them: config.json entries, a whole model through transformers, adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sprawl.delta.files import save_state
from sprawl.delta.views import (
    FORMATS,
    adapter_config,
    adapter_view,
    dense_view,
    find_format,
    is_adapter,
    make_view,
    quantization_config,
)
from sprawl.errors import SprawlError

LOADABLE = [name for name, form in FORMATS.items() if form.quantized and form.dtype != torch.float8_e5m2]


def llama(hidden: int = 128):  # type: ignore[no-untyped-def]
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("form", [name for name in LOADABLE if FORMATS[name].source == "compressed-tensors"])
def test_transformers_loads_the_view_and_computes_with_its_values(form: str, tmp_path: Path) -> None:
    """A directory of our files, through transformers and compressed-tensors, against our own dense values."""
    pytest.importorskip("compressed_tensors", reason="transformers reads these layouts with it")
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    model = llama()
    masters = {name: p.detach().clone() for name, p in model.state_dict().items()}
    view = make_view(masters, form)
    save_state(view, tmp_path)
    config = model.config.to_dict() | {"quantization_config": quantization_config(find_format(form), masters)}
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=CompressedTensorsConfig(run_compressed=False), dtype=torch.float32
    )
    ids = torch.arange(8)[None]
    model.load_state_dict(dense_view(view))
    with torch.no_grad():
        expected, found = model(ids).logits, loaded(ids).logits
        model.load_state_dict(masters)
        exact = model(ids).logits
    difference = (found - expected).abs().max()
    assert difference < 0.02 * (expected - exact).abs().max() + 0.02 * expected.std(), "the engine's values are ours"


@pytest.mark.parametrize("form", LOADABLE)
def test_engines_parse_the_configuration(form: str) -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"]
    config = quantization_config(find_format(form), names)
    assert config is not None
    if config["quant_method"] == "fp8":
        from transformers import FineGrainedFP8Config

        parsed = FineGrainedFP8Config(**config)
        assert tuple(parsed.weight_block_size) == (128, 128)
        assert parsed.modules_to_not_convert == ["lm_head", "model.embed_tokens"]
        return
    library = pytest.importorskip("compressed_tensors.quantization", reason="what engines parse it with")
    parsed = library.QuantizationConfig.model_validate(config)
    weights = parsed.config_groups["group_0"].weights
    assert parsed.format == config["format"]
    assert parsed.ignore == ["lm_head", "model.embed_tokens"]
    assert (weights.num_bits, weights.group_size or 0) == (FORMATS[form].bits, FORMATS[form].group)


def test_what_engines_do_not_load_has_no_configuration() -> None:
    assert quantization_config(find_format("bfloat16"), []) is None
    with pytest.raises(SprawlError, match="float8_e5m2 has no engine configuration"):
        quantization_config(find_format("float8_e5m2"), [])


def adapter(rank: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.randn(rank, 16),
        "model.layers.0.self_attn.q_proj.lora_B.default.weight": torch.randn(16, rank),
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.randn(rank, 16),
        "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": torch.randn(24, rank),
    }


def test_an_adapter_has_the_names_that_engines_load() -> None:
    view = adapter_view(adapter())
    prefix = "base_model.model.model.layers.0."
    assert sorted(view) == [
        f"{prefix}mlp.up_proj.lora_A.weight",
        f"{prefix}mlp.up_proj.lora_B.weight",
        f"{prefix}self_attn.q_proj.lora_A.weight",
        f"{prefix}self_attn.q_proj.lora_B.weight",
    ]
    assert all(tensor.dtype == torch.bfloat16 for tensor in view.values())
    assert is_adapter(view)
    assert not is_adapter({"model.norm.weight"})
    assert not is_adapter([])
    config = adapter_config(view, 8.0, "base")
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8.0, ["q_proj", "up_proj"])
    assert config["rank_pattern"] == {}


def test_another_rank_goes_to_the_rank_pattern() -> None:
    extra = {"x.v_proj.lora_A.weight": torch.randn(2, 16), "x.v_proj.lora_B.weight": torch.randn(8, 2)}
    config = adapter_config(adapter_view({**adapter(), **extra}), 8.0, "base")
    assert config["r"] == 4
    assert config["rank_pattern"] == {"x.v_proj": 2}
    assert config["alpha_pattern"] == {"x.v_proj": 4.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": torch.ones(3)}, "model.norm.weight is no factor"),
        ({"x.lora_A.weight": torch.ones(2, 3)}, "adapter of x has lora_A only"),
        ({"x.lora_A.weight": torch.ones(2, 3), "x.lora_B.weight": torch.ones(3, 4)}, "do not multiply"),
    ],
)
def test_a_wrong_adapter_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(SprawlError, match=message):
        adapter_view({**adapter(), **change})
