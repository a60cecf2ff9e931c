"""Publishing by several writers: every rank writes the blobs of the tensors it owns, one of them commits.

    rank r:   part = PartWriter(store, run_id, writer=f"rank-{r}", keyframe_every=20).write(version, own_tensors)
    rank 0:   options = CommitOptions(keyframe_every=20, dtype="bfloat16", writer="rank-0")
              PartCommitter(store, run_id, options).commit(version, step, all_parts)

A `Part` is a small JSON-able record; how it reaches the committing rank (`gather_object`, a pipe, a file) is up to the
trainer. Nobody holds the whole state. Killed anywhere, the ranks call the same again: blobs are named by their content
and the manifest is created exclusively.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sprawl.board import keys
from sprawl.board.commit import CommitOptions, Committer, Draft, put_blob
from sprawl.board.manifest import DELTA, KEYFRAME, BlobEntry, TensorEntry
from sprawl.board.publisher import SHORT, copy_into
from sprawl.board.reader import VersionReader
from sprawl.board.receipts import PublishReceipt
from sprawl.board.signing import Trust
from sprawl.board.store import Store
from sprawl.delta.codec import encode, encode_whole
from sprawl.delta.state import State, clone_state, dtype_name, root_digest, state_bytes, tensor_digests
from sprawl.errors import BoardError, IntegrityError


class Part(BaseModel):
    """What one writer contributed to a version; its blobs are on the board."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: str
    version: int
    writer: str
    base: dict[str, str] = Field(description="Digests of the tensors this writer held as version - 1.")
    tensors: dict[str, TensorEntry] = Field(description="Every tensor it owns now, with complete digests.")
    changed: dict[str, int] = Field(description="Changed elements of those that differ from the base.")
    elements: int
    bytes: int = Field(description="Of the owned tensors, uncompressed.")
    blobs: list[BlobEntry]

    @classmethod
    def from_json(cls, text: str) -> Part:
        """Raises IntegrityError when `text` is not a part (`model_dump_json` writes one)."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise IntegrityError(f"not a part of a version: {error.errors()[0]['msg']}") from None


class PartWriter:
    """Writes one rank's share of every version. Not thread-safe; the tensors it owns may change between versions.

    `keyframe_every` and `origin` have to be those of the committer. A writer that starts in the middle of a run reads
    what it owns from the board, as does one that missed a version.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        writer: str,
        keyframe_every: int,
        origin: int = 0,
        trust: Trust | None = None,
    ) -> None:
        if keyframe_every < 1:
            raise ValueError("keyframe_every must be at least 1")
        self._store = store
        self._run_id = run_id
        self._writer = writer
        self._keyframe_every = keyframe_every
        self._origin = origin
        self._trust = trust
        self._base: tuple[int, State, dict[str, str]] | None = None

    def resume(self, version: int, owned: State) -> None:
        """Take `owned` as this rank's tensors of `version`, which the caller knows to be what was published; they are
        copied. Without it they are read from the board."""
        self._base = (version, clone_state(owned), tensor_digests(owned))

    def write(self, version: int, owned: State) -> Part:
        """Write the blobs of this rank's tensors of `version`; the tensors are copied. Idempotent.

        Raises BoardError when version - 1 is needed and not on the board, or the store fails.
        """
        digests = tensor_digests(owned)
        base: State = {}
        base_digests: dict[str, str] = {}
        if version > self._origin:
            base, base_digests = self._base_of(version - 1, owned)
        blobs: list[BlobEntry] = []
        changed = {name: tensor.numel() for name, tensor in owned.items()}
        if version > self._origin:
            delta = encode({name: tensor for name, tensor in base.items() if name in owned}, owned)
            changed = {name: info.changed for name, info in delta.tensors.items() if info.kind != "unchanged"}
            blobs.append(put_blob(self._store, self._run_id, version, delta.blob, DELTA))
        if version == self._origin or version % self._keyframe_every == 0:
            blobs.append(put_blob(self._store, self._run_id, version, encode_whole(owned), KEYFRAME))
        part = Part(
            run_id=self._run_id,
            version=version,
            writer=self._writer,
            base=base_digests,
            tensors={
                name: TensorEntry(digest=digests[name], dtype=dtype_name(tensor.dtype), shape=list(tensor.shape))
                for name, tensor in owned.items()
            },
            changed=changed,
            elements=sum(tensor.numel() for tensor in owned.values()),
            bytes=state_bytes(owned),
            blobs=blobs,
        )
        kept = self._base[1] if self._base is not None else {}
        self._base = (version, copy_into(kept, owned), digests)
        return part

    def _base_of(self, version: int, owned: State) -> tuple[State, dict[str, str]]:
        if self._base is None or self._base[0] != version:
            served = VersionReader(self._store, self._run_id, trust=self._trust).materialise(version)
            state = {name: tensor for name, tensor in served.state.items() if name in owned}
            self._base = (version, state, {name: served.digests[name] for name in state})
        _, state, digests = self._base
        return state, digests


class PartCommitter:
    """Commits versions from the parts of all writers. `options.writer` is the process that commits."""

    def __init__(self, store: Store, run_id: str, options: CommitOptions) -> None:
        self._committer = Committer(store, run_id, options)

    def commit(
        self, version: int, step: int, parts: Sequence[Part], *, extra: dict[str, Any] | None = None
    ) -> PublishReceipt:
        """Commit `version` out of `parts`, one a writer. Idempotent.

        Raises IntegrityError when the parts are not one state (a tensor owned twice, a base that is not version - 1,
        blobs missing) or the board holds another state under this version; FencedError and BoardError as `Publisher`.
        """
        started = time.monotonic()
        tensors = self._united(version, parts)
        root = root_digest({name: entry.digest for name, entry in tensors.items()})
        manifest = self._committer.reader.manifest(version)
        committed_before = manifest is not None
        if manifest is None:
            draft = self._draft(version, step, parts, tensors, root, extra or {})
            manifest, committed_before = self._committer.commit(draft)
        return self._committer.settle(manifest, root, started, committed_before)

    def _united(self, version: int, parts: Sequence[Part]) -> dict[str, TensorEntry]:
        run_id = self._committer.run_id
        owner: dict[str, str] = {}
        tensors: dict[str, TensorEntry] = {}
        for part in parts:
            if part.run_id != run_id or part.version != version:
                raise IntegrityError(
                    f"the part of {part.writer} is of version {part.version} of run {part.run_id!r}, "
                    f"not of version {version} of run {run_id!r}"
                )
            for name in part.tensors:
                if name in owner:
                    raise IntegrityError(
                        f"version {version}: tensor {name!r} is in the parts of {owner[name]} and {part.writer}",
                        "every tensor has one owner; tied and replicated ones too",
                    )
                owner[name] = part.writer
            tensors.update(part.tensors)
        return tensors

    def _draft(
        self,
        version: int,
        step: int,
        parts: Sequence[Part],
        tensors: dict[str, TensorEntry],
        root: str,
        extra: dict[str, Any],
    ) -> Draft:
        base_root: str | None = None
        removed: list[str] = []
        if version > self._committer.origin:
            base_root, removed = self._base(version, parts, tensors)
        self._check_blobs(version, parts)
        keyframe = self._committer.keyframe_of(version) == version
        changed = {name: count for part in parts for name, count in part.changed.items()}
        short = {
            name: entry.model_copy(update={"digest": entry.digest[:SHORT]})
            for name, entry in tensors.items()
            if name in changed
        }
        return Draft(
            version=version,
            step=step,
            root=root,
            base_version=version - 1 if base_root is not None else None,
            base_root=base_root,
            tensors=tensors if keyframe else short,
            blobs=[blob for part in parts for blob in part.blobs],
            removed=removed,
            changed_share=sum(changed.values()) / max(1, sum(part.elements for part in parts)),
            full_bytes=sum(part.bytes for part in parts),
            extra=extra,
            writers=sorted(part.writer for part in parts),
        )

    def _base(self, version: int, parts: Sequence[Part], tensors: dict[str, TensorEntry]) -> tuple[str, list[str]]:
        """Root digest of version - 1, which the bases of all parts must add up to, and the tensors that are gone."""
        base: dict[str, str] = {}
        for part in parts:
            for name, digest in part.base.items():
                if base.setdefault(name, digest) != digest:
                    raise IntegrityError(f"version {version}: writers hold different bases of tensor {name!r}")
        before = self._committer.reader.manifest(version - 1)
        if before is None:
            raise BoardError(f"version {version - 1} of run {self._committer.run_id!r} is not on the board")
        root = root_digest(base)
        if root != before.root_digest:
            raise IntegrityError(
                f"version {version}: the writers' bases add up to root digest {root}, version {version - 1} was "
                f"published with {before.root_digest}",
                "every tensor of the version before needs a writer that held it",
            )
        return root, sorted(set(base) - set(tensors))

    def _check_blobs(self, version: int, parts: Sequence[Part]) -> None:
        run_id, store = self._committer.run_id, self._committer.store
        roles = {KEYFRAME} if self._committer.keyframe_of(version) == version else set()
        roles |= {DELTA} if version > self._committer.origin else set()
        for part in parts:
            if {blob.role for blob in part.blobs} != roles:
                raise IntegrityError(
                    f"version {version}: {part.writer} wrote {sorted(blob.role for blob in part.blobs)}, "
                    f"this version needs {sorted(roles)}",
                    "give all writers and the committer the same keyframe_every and origin",
                )
            for blob in part.blobs:
                key = keys.blob(run_id, version, blob.digest)
                if not store.exists(key):
                    raise IntegrityError(f"version {version}: {key} of {part.writer} is not on the board")
