"""The part of an island that runs inside vLLM's worker: brings the model to what is in the checkpoint on local disk.

Named as `--worker-extension-cls`; importing it registers the weight-transfer backend `BACKEND`. There are two ways.

In place: where all that changes is in parameters that are the checkpoint's tensors (`plain`), the changed elements are
written into them. The journal of the step on disk names them; it is read, and taken to the device, before the pause.

Layer by layer: the changed tensors, closed over the modules that hold them, are read from the checkpoint and processed
as at the start. This serves everything else: layers that are quantised or repacked, a new server, a jump to a whole
new file.
"""

from __future__ import annotations

import json
import logging
import time
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
from sprawl.rollout.vllm.plain import keep_plain, plain_places
from sprawl.rollout.vllm.staging import MARK, Home, Staged, stage

WEIGHTS = "model.safetensors"
log = logging.getLogger("vllm.sprawl")  # the server writes its log down


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The model was loaded from the checkpoint in `directory`."""

    directory: str


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
        """Find out which parameters are the checkpoint's tensors. No forward pass may run meanwhile."""
        self._homes: dict[str, Home] = {}
        self._root: str | None = None  # of the state that is served
        self._staged: Staged | None = None
        directory = Path(init_info.directory)
        before = _root(directory)
        with safe_open(directory / WEIGHTS, framework="pt") as file:
            tensors = dict(_tensors(file, list(file.keys())))
            places, why = plain_places(self.model, tensors)
        self._homes = {
            name: Home(tensors[name].dtype, tuple(tensors[name].shape), pieces) for name, pieces in places.items()
        }
        # Had the checkpoint moved on since the model was loaded, what differs has no home, and the swap that follows
        # starts at a state that is not this one: it goes the long way.
        if _root(directory) == before:
            self._root = before
        log.info("%s of %s tensors can be changed in place. %s", len(places), len(tensors), why)

    def start_weight_update(self) -> None:
        """Everything happens in `receive_weights`."""

    def finish_weight_update(self) -> None:
        """Everything happened in `receive_weights`."""

    def shutdown(self) -> None:
        """Holds nothing."""

    def stage(self, directory: Path, root_digest: str) -> None:
        """Begin to make ready the journal that leads to the state with `root_digest`. Touches nothing."""
        self._staged = None
        here = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        kept = (piece.target.untyped_storage().data_ptr() in here for h in self._homes.values() for piece in h.pieces)
        if self._root is not None and all(kept):
            self._staged = stage(directory, self._root, root_digest, self._homes)

    def staged(self) -> dict[str, Any]:
        """How far that is."""
        if self._staged is None:
            return {"done": True, "why": "the model is not where it was after its start"}
        return {"done": self._staged.done.is_set(), "why": self._staged.why}

    def write(self, root_digest: str) -> bool:
        """Take the model to the state with `root_digest` if that was made ready; False: nothing was touched."""
        staged, self._staged = self._staged, None
        if staged is None or not staged.leads(self._root, root_digest):
            return False
        self._root = None
        started = time.monotonic()
        staged.write()
        torch.accelerator.synchronize()
        log.info("%s writes in place took %.4f s", len(staged.writes), time.monotonic() - started)
        self._root = root_digest
        return True

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises ValueError when the checkpoint is at another state or lacks a tensor."""
        self._staged = self._root = None
        directory = Path(update_info.directory)
        _check_state(directory, update_info.root_digest)
        self._reload(directory, update_info.names)
        self._root = update_info.root_digest

    def _reload(self, directory: Path, changed: Sequence[str]) -> None:
        with safe_open(directory / WEIGHTS, framework="pt") as file:
            names = close(changed, file.keys(), _fused_groups(self.model))
            if not names:
                return
            shared = _shared_modules(self.model)
            initialize_layerwise_reload(self.model)
            self.model.load_weights(_tensors(file, names))
            finalize_layerwise_reload(self.model, self.model_config)
        for module in shared:
            module.quant_method.process_weights_after_loading(module)


class Extension:
    """Mixed into vLLM's worker; the methods are reached by `/collective_rpc`."""

    weight_transfer_engine: Any
    model_runner: Any

    def sprawl_stage(self, directory: str, root_digest: str) -> None:
        """See `LocalCopyTransfer.stage`."""
        self.weight_transfer_engine.stage(Path(directory), root_digest)

    def sprawl_staged(self) -> dict[str, Any]:
        """See `LocalCopyTransfer.staged`."""
        found: dict[str, Any] = self.weight_transfer_engine.staged()
        return found

    def sprawl_write(self, root_digest: str) -> dict[str, bool]:
        """See `LocalCopyTransfer.write`. One call, where vLLM's own way takes three: each costs a pause of its own."""
        written = self.weight_transfer_engine.write(root_digest)
        if written:
            self.model_runner.reset_lora_state()
        return {"written": written}


def _root(directory: Path) -> str:
    return str(json.loads((directory / MARK).read_bytes())["root_digest"])


def _check_state(directory: Path, root_digest: str) -> None:
    if _root(directory) != root_digest:
        raise ValueError(f"{directory} is at the state with root digest {_root(directory)}, not at {root_digest}")


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
keep_plain()
