"""Publishing by one writer that holds the whole state: blobs, then the manifest, whose creation is the commit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sprawl.board.commit import CommitOptions, Committer, Draft, put_blob
from sprawl.board.manifest import DELTA, KEYFRAME, BlobEntry, TensorEntry
from sprawl.board.reader import Served
from sprawl.board.receipts import PublishReceipt
from sprawl.board.store import Store
from sprawl.delta.codec import Encoded, encode, encode_whole
from sprawl.delta.state import State, clone_state, dtype_name, root_digest, state_bytes, tensor_digests
from sprawl.delta.views import is_adapter

SHORT = 16
"""Digits of a tensor digest that a delta's manifest carries."""


@dataclass(frozen=True)
class _Version:
    """What is about to be published."""

    version: int
    step: int
    state: State
    digests: dict[str, str]
    root: str


class Publisher:
    """Publishes versions 0, 1, 2, ... of a run. Safe to kill at any moment and to call again; not thread-safe.

    A state that is a LoRA adapter is published whole every time: it is small, and a delta of it hardly smaller.
    """

    def __init__(self, store: Store, run_id: str, options: CommitOptions) -> None:
        self._committer = Committer(store, run_id, options)
        self._store = store
        self._run_id = run_id
        self._reader = self._committer.reader
        self._base: Served | None = None

    def resume(self, state: Mapping[str, torch.Tensor] | None, version: int) -> bool:
        """Take `version` as the base of the next delta: `state` when it is what was published, else from the board.

        Returns whether `state` was the published one. Raises BoardError when the version is not on the board.
        """
        manifest = self._reader.manifest(version)
        if manifest is not None and state is not None:
            digests = tensor_digests(state)
            if root_digest(digests) == manifest.root_digest:
                self._base = Served(version, clone_state(state), digests, manifest.root_digest)
                return True
        self._base = self._reader.materialise(version)
        return False

    def publish(self, version: int, step: int, state: State, *, extra: dict[str, Any] | None = None) -> PublishReceipt:
        """Publish `state` as `version`; the state is copied. Idempotent.

        Raises IntegrityError when the board already holds another state under this version, FencedError when a newer
        writer took over, BoardError when version - 1 is not on the board or the store fails.
        """
        started = time.monotonic()
        digests = tensor_digests(state)
        new = _Version(version, step, state, digests, root_digest(digests))
        manifest = self._reader.manifest(version)
        committed_before = manifest is not None
        if manifest is None:
            manifest, committed_before = self._committer.commit(self._write_blobs(new, extra or {}))
        receipt = self._committer.settle(manifest, new.root, started, committed_before)
        self._remember(new)
        return receipt

    def _write_blobs(self, new: _Version, extra: dict[str, Any]) -> Draft:
        whole = is_adapter(new.state)
        first = new.version == self._committer.origin
        base = None if first or whole else self._require_base(new.version - 1)
        keyframe = whole or self._committer.keyframe_of(new.version) == new.version
        delta: Encoded | None = None
        blobs: list[BlobEntry] = []
        if base is not None:
            delta = encode(base.state, new.state, base_root=base.root, new_root=new.root)
            blobs.append(put_blob(self._store, self._run_id, new.version, delta.blob, DELTA))
        if keyframe:
            blobs.append(put_blob(self._store, self._run_id, new.version, encode_whole(new.state), KEYFRAME))
        return Draft(
            version=new.version,
            step=new.step,
            root=new.root,
            base_version=None if base is None else base.version,
            base_root=None if base is None else base.root,
            tensors=_all_tensors(new) if keyframe or delta is None else _changed_tensors(new, base, delta),
            blobs=blobs,
            removed=[] if delta is None else delta.removed,
            changed_share=1.0 if delta is None else delta.changed / max(1, delta.elements),
            full_bytes=state_bytes(new.state),
            extra=extra,
            whole=whole,
        )

    def _require_base(self, version: int) -> Served:
        if self._base is None or self._base.version != version:
            self.resume(None, version)
        assert self._base is not None
        return self._base

    def _remember(self, new: _Version) -> None:
        """Copy the published state: the trainer goes on changing its own."""
        kept = self._base.state if self._base is not None else {}
        self._base = None  # its memory is reused
        self._base = Served(new.version, copy_into(kept, new.state), new.digests, new.root)


def copy_into(kept: State, state: State) -> State:
    """A copy of `state` that reuses the memory of `kept` where shapes and dtypes agree."""
    copied: State = {}
    for name, tensor in state.items():
        old = kept.get(name)
        if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
            copied[name] = old.copy_(tensor)
        else:
            copied[name] = clone_state({name: tensor})[name]
    return copied


def _all_tensors(new: _Version) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(digest=new.digests[name], dtype=dtype_name(tensor.dtype), shape=list(tensor.shape))
        for name, tensor in new.state.items()
    }


def _changed_tensors(new: _Version, base: Served | None, delta: Encoded) -> dict[str, TensorEntry]:
    entries = {}
    for name, info in delta.tensors.items():
        if info.kind == "unchanged":
            continue
        tensor = new.state[name]
        old = base.state.get(name) if base is not None else None
        same = old is not None and old.dtype == tensor.dtype and old.shape == tensor.shape
        entries[name] = TensorEntry(
            digest=new.digests[name][:SHORT],
            dtype=None if same else dtype_name(tensor.dtype),
            shape=None if same else list(tensor.shape),
        )
    return entries
