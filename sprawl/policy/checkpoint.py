"""Read and write Hugging Face safetensors directories."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sprawl.delta.views import find_format, quantization_config
from sprawl.errors import ConfigError
from sprawl.policy.architecture import Architecture

AUXILIARY = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a (possibly sharded) safetensors checkpoint. Raises ConfigError when there is none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"no *.safetensors in {directory}", "policy.base must be a HF safetensors directory")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state.update(load_file(file))
    return state


def load_auxiliary(directory: Path) -> dict[str, bytes]:
    """The files besides the weights that an island needs (config.json, tokenizer.json ...)."""
    return {name: (directory / name).read_bytes() for name in AUXILIARY if (directory / name).is_file()}


def read_architecture(files: Mapping[str, bytes]) -> Architecture:
    """Architecture from the bytes of config.json. Raises ConfigError: there is none, or it cannot be used."""
    if "config.json" not in files:
        raise ConfigError("the base model has no config.json", "policy.base must be a HF safetensors directory")
    try:
        config = json.loads(files["config.json"])
    except ValueError as error:
        raise ConfigError(f"config.json of the model is not JSON: {error}", "give the one that came with it") from None
    return Architecture.from_hf(config)


def served_files(files: Mapping[str, bytes], format: str, names: Iterable[str]) -> dict[str, bytes]:
    """`files` as they belong to a view in `format` of masters with these `names`: config.json says what is served."""
    config = json.loads(files["config.json"])
    served = find_format(format)
    config.pop("dtype", None)
    config["torch_dtype"] = "bfloat16" if served.quantized else format
    config.pop("quantization_config", None)
    if (quantization := quantization_config(served, names)) is not None:
        config["quantization_config"] = quantization
    return {**files, "config.json": json.dumps(config, indent=2).encode()}


def drop_tied_head(state: dict[str, torch.Tensor], arch: Architecture) -> dict[str, torch.Tensor]:
    """Without the copy of the embeddings that some checkpoints store under lm_head although they are tied."""
    if arch.tied:
        state = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    return state


def save_checkpoint(directory: Path, state: Mapping[str, torch.Tensor], files: Mapping[str, bytes]) -> None:
    """Write model.safetensors and the auxiliary files into a (new) directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in state.items()}, directory / "model.safetensors", {"format": "pt"})
    for name, data in files.items():
        (directory / name).write_bytes(data)
