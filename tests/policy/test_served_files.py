import json

import pytest

from sprawl.policy.checkpoint import read_architecture, served_files

NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
FILES = {
    "config.json": json.dumps(
        {
            "model_type": "qwen2",
            "torch_dtype": "float32",
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "quantization_config": {"quant_method": "of the base, not of what is served"},
        }
    ).encode(),
    "tokenizer.json": b"{}",
}


@pytest.mark.parametrize("format", ["bfloat16", "float16"])
def test_plain_views_say_their_dtype(format: str) -> None:
    files = served_files(FILES, format, NAMES)
    config = json.loads(files["config.json"])
    assert config["torch_dtype"] == format
    assert "quantization_config" not in config
    assert files["tokenizer.json"] == FILES["tokenizer.json"]


def test_quantised_views_say_how_to_read_them() -> None:
    config = json.loads(served_files(FILES, "nvfp4", NAMES)["config.json"])
    assert config["torch_dtype"] == "bfloat16"
    assert config["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]


def test_the_architecture_is_the_same() -> None:
    assert read_architecture(served_files(FILES, "float8_e4m3", NAMES)) == read_architecture(FILES)
