"""The part of an island that runs inside vLLM's worker: loads changed tensors from the checkpoint on local disk.

Named as `--worker-extension-cls`; importing it registers the weight-transfer backend `BACKEND`. Imports nothing of
Sprawl but names, and nothing that the worker has not loaded already.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from sprawl.rollout.vllm import BACKEND
from sprawl.rollout.vllm.groups import FUSED, close


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: every update names its checkpoint."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Load `names` from the checkpoint in `directory`, which must be at the state with `root_digest`."""

    directory: str
    root_digest: str
    names: list[str]


class LocalCopyTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One update is one call, because no forward pass may run between the beginning of a layer-wise reload and its
    end. The engine must be paused. An update that raises leaves the model unusable: end the process."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Needs no set-up."""

    def start_weight_update(self) -> None:
        """Everything happens in `receive_weights`."""

    def finish_weight_update(self) -> None:
        """Everything happened in `receive_weights`."""

    def shutdown(self) -> None:
        """Holds nothing."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises ValueError when the checkpoint is at another state or lacks a tensor."""
        directory = Path(update_info.directory)
        _check_state(directory, update_info.root_digest)
        with safe_open(directory / "model.safetensors", framework="pt") as file:
            names = close(update_info.names, file.keys(), _fused_groups(self.model))
            if not names:
                return
            shared = _shared_modules(self.model)
            initialize_layerwise_reload(self.model)
            self.model.load_weights(_tensors(file, names))
            finalize_layerwise_reload(self.model, self.model_config)
        for module in shared:
            module.quant_method.process_weights_after_loading(module)


class Extension:
    """Mixed into vLLM's worker. It adds nothing: naming it makes the worker import this module."""


def _check_state(directory: Path, root_digest: str) -> None:
    mark = json.loads((directory / "sprawl.json").read_bytes())
    if mark["root_digest"] != root_digest:
        raise ValueError(f"{directory} is at version {mark['version']} ({mark['root_digest']}), not at {root_digest}")


def _fused_groups(model: torch.nn.Module) -> Mapping[str, Sequence[str]]:
    own = getattr(model, "packed_modules_mapping", None)
    return {**FUSED, **own} if own else FUSED


def _tensors(file: Any, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        yield name, file.get_tensor(name)


def _shared_modules(model: torch.nn.Module) -> list[Any]:
    """Modules whose weight belongs to a module before them: a head tied to the embedding. What they derived from it
    (on CPU a repacked copy) is not renewed by loading the weight where it belongs."""
    seen: set[int] = set()
    shared: list[Any] = []
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or not hasattr(module, "quant_method"):
            continue
        if id(weight) in seen:
            shared.append(module)
        seen.add(id(weight))
    return shared


WeightTransferEngineFactory.register_engine(BACKEND, LocalCopyTransfer)
