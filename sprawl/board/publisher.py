"""Publishing: the only writer of a run's versions. Blobs first; the manifest, created exclusively, is the commit."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.manifest import DELTA, FILE, KEYFRAME, BlobEntry, Manifest, TensorEntry
from sprawl.board.reader import Served, VersionReader
from sprawl.board.receipts import PublishReceipt
from sprawl.board.store import MissingKey, Store
from sprawl.delta.codec import Encoded, encode, encode_whole
from sprawl.delta.state import State, clone_state, dtype_name, root_digest, state_bytes, tensor_digests
from sprawl.errors import BoardError, IntegrityError

_SHORT = 16


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

    `dtype` names the served view's floating dtype (recorded, the caller rounds). `files` (config.json,
    tokenizer.json ...) are stored with every keyframe. With `epoch` > 0 a newer writer fences this one.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        keyframe_every: int,
        dtype: str,
        epoch: int = 0,
        writer: str = "trainer",
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        if keyframe_every < 1:
            raise ValueError("keyframe_every must be at least 1")
        self._store = store
        self._run_id = run_id
        self._keyframe_every = keyframe_every
        self._dtype = dtype
        self._epoch = epoch
        self._writer = writer
        self._files = dict(files or {})
        self._reader = VersionReader(store, run_id)
        self._ledger = Ledger(store, run_id)
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
            manifest, committed_before = self._commit(self._write_blobs(new, extra or {}))
        if manifest.root_digest != new.root:
            raise IntegrityError(
                f"version {version} of run {self._run_id!r} is on the board with root digest {manifest.root_digest}, "
                f"this state has {new.root}: the same version number can never mean two states",
                "start a new run, or resume from the state that was published",
            )
        self._remember(new)
        self._hint(version)
        return PublishReceipt(
            version=version,
            step=step,
            kind=manifest.kind,
            sent_bytes=manifest.sent_bytes + len(manifest.to_bytes()),
            full_bytes=manifest.full_bytes,
            changed_share=manifest.changed_share,
            root_digest=manifest.root_digest,
            seconds=time.monotonic() - started,
            already_committed=committed_before,
        )

    def _write_blobs(self, new: _Version, extra: dict[str, Any]) -> Manifest:
        base = self._require_base(new.version - 1) if new.version > 0 else None
        keyframe = new.version % self._keyframe_every == 0
        delta: Encoded | None = None
        blobs: list[BlobEntry] = []
        if base is not None:
            delta = encode(base.state, new.state, base_root=base.root, new_root=new.root)
            blobs.append(self._put(new.version, delta.blob, DELTA))
        files: dict[str, str] = {}
        if keyframe:
            blobs.append(self._put(new.version, encode_whole(new.state), KEYFRAME))
            for name, data in sorted(self._files.items()):
                entry = self._put(new.version, data, FILE)
                files[name] = entry.digest
                blobs.append(entry)
        return Manifest(
            run_id=self._run_id,
            version=new.version,
            base_version=None if base is None else base.version,
            keyframe_version=new.version - new.version % self._keyframe_every,
            kind="keyframe" if keyframe else "delta",
            step=new.step,
            dtype=self._dtype,
            tensors=_all_tensors(new) if keyframe or delta is None else _changed_tensors(new, base, delta),
            removed=[] if delta is None else delta.removed,
            blobs=blobs,
            root_digest=new.root,
            base_root_digest=None if base is None else base.root,
            nonce=secrets.token_hex(16),
            writer=self._writer,
            epoch=self._epoch,
            created_at=time.time(),
            changed_share=1.0 if delta is None else delta.changed / max(1, delta.elements),
            full_bytes=state_bytes(new.state),
            sent_bytes=sum(blob.size for blob in blobs),
            files=files,
            extra=extra,
        )

    def _put(self, version: int, data: bytes, role: str) -> BlobEntry:
        digest = blake3(data).hexdigest()
        self._store.put(keys.blob(self._run_id, version, digest), data)
        return BlobEntry(digest=digest, size=len(data), role=role)

    def _commit(self, manifest: Manifest) -> tuple[Manifest, bool]:
        """The manifest that is on the board now, and whether another commit was there first."""
        if self._epoch > 0:
            self._ledger.check_epoch(self._epoch)
        if self._store.create(keys.manifest(self._run_id, manifest.version), manifest.to_bytes()):
            return manifest, False
        held = self._reader.manifest(manifest.version)
        if held is None:
            raise BoardError(
                f"version {manifest.version} of run {self._run_id!r} vanished while it was published",
                "check that no other tool deletes from the board",
            )
        return held, True

    def _require_base(self, version: int) -> Served:
        if self._base is None or self._base.version != version:
            self.resume(None, version)
        assert self._base is not None
        return self._base

    def _remember(self, new: _Version) -> None:
        """Copy the published state: the trainer goes on changing its own."""
        kept = self._base.state if self._base is not None else {}
        self._base = None  # its memory is reused
        state: State = {}
        for name, tensor in new.state.items():
            old = kept.get(name)
            if old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype:
                state[name] = old.copy_(tensor)
            else:
                state[name] = clone_state({name: tensor})[name]
        self._base = Served(new.version, state, new.digests, new.root)

    def _hint(self, version: int) -> None:
        key = keys.latest(self._run_id)
        try:
            if json.loads(self._store.get(key))["version"] >= version:
                return
        except (MissingKey, ValueError, TypeError, KeyError):
            pass
        self._store.put(key, json.dumps({"version": version, "at": time.time()}).encode())


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
            digest=new.digests[name][:_SHORT],
            dtype=None if same else dtype_name(tensor.dtype),
            shape=None if same else list(tensor.shape),
        )
    return entries
