"""Turn a llama-architecture GGUF file into a Hugging Face model directory (bf16 safetensors, config, tokenizer).

Only `gguf` and `tokenizers` are needed. Quantised tensors are dequantised to fp32 and rounded to bf16 once, to
nearest even; the query and key rows, which GGUF interleaves for its rotary embedding, are put back in HF order.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from sprawl.errors import SprawlError

# GGUF tensor names of one block -> HF names below `model.layers.<i>.`
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Pre-tokenizers that split every digit off before the GPT-2 byte-level split.
DIGIT_SPLITTING = {"smollm"}
CONTROL_TOKEN = 3


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises SprawlError for an unknown tensor."""
    stem, _, suffix = name.rpartition(".")
    if suffix == "weight":
        if stem in TOP_NAMES:
            return f"{TOP_NAMES[stem]}.weight"
        prefix, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if prefix == "blk" and layer.isdigit() and part in BLOCK_NAMES:
            return f"model.layers.{layer}.{BLOCK_NAMES[part]}.weight"
    raise SprawlError(f"GGUF tensor {name!r} has no counterpart in a llama model")


def deinterleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection, `[heads * D, H]`, from GGUF's rotary pairs (0, D/2, 1, ...) to HF's halves."""
    width = rows.shape[0] // heads
    pairs = rows.reshape(heads, width // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def model_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM from GGUF metadata. Raises SprawlError for another architecture."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise SprawlError(f"GGUF architecture {architecture!r} is not supported", "only 'llama' is")
    hidden = fields["llama.embedding_length"]
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        # GGUF stores fp32; its shortest decimal is the number that was meant (1e-05).
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def write_weights(reader: Any, fields: dict[str, Any], path: Path) -> None:
    """Write bf16 safetensors with HF names."""
    import gguf.quants
    import torch
    from safetensors.torch import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if part in heads:
            values = deinterleave(values, heads[part])
        state[hf_name(tensor.name)] = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
    save_file(state, path, metadata={"format": "pt"})


def write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    """Write tokenizer.json (byte-level BPE) and tokenizer_config.json (special tokens, chat template)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, split = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in DIGIT_SPLITTING:
        raise SprawlError(f"GGUF tokenizer {kind!r} with pre-tokenizer {split!r} is not supported")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
    }
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    _write_json(directory / "tokenizer_config.json", settings)


def convert(source: Path, directory: Path) -> None:
    """Convert the GGUF file `source` into HF files inside the existing `directory`, durably.

    Raises SprawlError for an architecture, tensor or tokenizer that this conversion does not know.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    config = model_config(fields, tied=tied)
    _write_json(directory / "config.json", config)
    write_weights(reader, fields, directory / "model.safetensors")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", ids)
    write_tokenizer(fields, directory)
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
