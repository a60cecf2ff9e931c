"""Which parameters of vLLM's are the tensors of the checkpoint, bit for bit, and nothing is derived from them.

On a GPU that is every layer of an unquantised dense model. On CPU vLLM repacks each layer for oneDNN and throws the
weight away; with `KEEP_PLAIN` set in its environment it does what it does where oneDNN is missing, and multiplies with
the weights as they are.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from sprawl.rollout.vllm import KEEP_PLAIN
from sprawl.rollout.vllm.places import Piece, watch


def keep_plain() -> None:
    """Before the model is loaded: let CPU layers keep their weights, if the environment asks for it."""
    if os.environ.get(KEEP_PLAIN) != "1" or not current_platform.is_cpu():
        return
    repack = utils.dispatch_cpu_unquantized_gemm

    def keep(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            repack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = keep


def plain_places(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, list[Piece]], str]:
    """Where `tensors` (the checkpoint that `model` was loaded from) are, those that may be written there; and why the
    others are not among them, empty when all are. Reads every weight once. Nothing may use the model meanwhile."""
    derives = [type(module).__name__ for module in model.modules() if _derives(module)]
    if derives:
        return {}, f"{derives[0]} computes something from its weights"
    try:
        places = watch(model.load_weights, tensors)  # type: ignore[arg-type]
    except Exception as error:  # loaders of layers that are repacked refuse, each in its own words
        return {}, f"the model's loader cannot be followed: {' '.join(str(error).split())}"
    owners = _owners(model)
    plain = {name: pieces for name, pieces in places.items() if all(_is_plain(piece, owners) for piece in pieces)}
    plain = {name: pieces for name, pieces in plain.items() if all(piece.holds(tensors[name]) for piece in pieces)}
    others = [name for name in tensors if name not in plain]
    return plain, f"{len(others)} of {len(tensors)} tensors are processed after loading" if others else ""


def _derives(module: torch.nn.Module) -> bool:
    """Whether it has processing of its own. Plain attention only has scales of its KV cache to process."""
    return type(module) is not Attention and hasattr(module, "process_weights_after_loading")


def _owners(model: torch.nn.Module) -> dict[int, list[torch.nn.Module]]:
    """By the memory of a parameter, the modules that have it: two when a head is tied."""
    owners: dict[int, list[torch.nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.numel():
                owners[parameter.untyped_storage().data_ptr()].append(module)
    return owners


def _is_plain(piece: Piece, owners: Mapping[int, list[torch.nn.Module]]) -> bool:
    modules = owners.get(piece.target.untyped_storage().data_ptr(), [])
    return bool(modules) and all(_keeps_weights(module) for module in modules)


def _keeps_weights(module: Any) -> bool:
    method = getattr(module, "quant_method", None)
    if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        return False
    # What multiplies on CPU holds a repacked copy if it holds anything.
    multiply = module.__dict__.get("cpu_linear")
    return not (getattr(multiply, "__closure__", None) or getattr(multiply, "__defaults__", None))
