"""The commit of a version: blobs first, then the manifest, created exclusively, then the hint."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.manifest import FILE, KEYFRAME, BlobEntry, Manifest, TensorEntry
from sprawl.board.reader import VersionReader
from sprawl.board.receipts import PublishReceipt
from sprawl.board.signing import Signer
from sprawl.board.store import MissingKey, Store
from sprawl.errors import BoardError, IntegrityError, OvertakenError


@dataclass(frozen=True)
class Draft:
    """What a writer says about a version whose blobs are on the board. `tensors`, `blobs` as in the manifest."""

    version: int
    step: int
    root: str
    base_version: int | None
    base_root: str | None
    tensors: dict[str, TensorEntry]
    blobs: list[BlobEntry]
    removed: list[str]
    changed_share: float
    full_bytes: int
    extra: dict[str, Any] = field(default_factory=dict)
    writers: list[str] = field(default_factory=list)
    whole: bool = False  # a keyframe whatever its number


def put_blob(store: Store, run_id: str, version: int, data: bytes, role: str) -> BlobEntry:
    """Write a blob under its digest. Writing it again is harmless."""
    digest = blake3(data).hexdigest()
    store.put(keys.blob(run_id, version, digest), data)
    return BlobEntry(digest=digest, size=len(data), role=role)


@dataclass(frozen=True)
class CommitOptions:
    """How the versions of a run are committed, by one writer or by several.

    `dtype` names the served view's floating dtype (recorded, the caller rounds). `files` (config.json,
    tokenizer.json ...) are stored with every keyframe. With `epoch` > 0 a newer writer fences this one. With `signer`
    every manifest is signed. `origin` is the number of the run's first version, for chains that began elsewhere.
    """

    keyframe_every: int
    dtype: str
    epoch: int = 0
    writer: str = "trainer"
    files: Mapping[str, bytes] = field(default_factory=dict)
    signer: Signer | None = None
    origin: int = 0

    def __post_init__(self) -> None:
        if self.keyframe_every < 1:
            raise ValueError("keyframe_every must be at least 1")


class Committer:
    """Commits versions of one run."""

    def __init__(self, store: Store, run_id: str, options: CommitOptions) -> None:
        self.store = store
        self.run_id = run_id
        self.reader = VersionReader(store, run_id)
        self.origin = options.origin
        self._options = options
        self._ledger = Ledger(store, run_id)

    def keyframe_of(self, version: int) -> int:
        """The newest keyframe at or below `version`: every nth version, and the run's first."""
        return max(self.origin, version - version % self._options.keyframe_every)

    def commit(self, draft: Draft) -> tuple[Manifest, bool]:
        """The manifest that is on the board now, and whether another commit was there first.

        Raises FencedError when a newer writer took over, BoardError when the store fails.
        """
        manifest = self._manifest(draft)
        if self._options.epoch > 0:
            self._ledger.check_epoch(self._options.epoch)
        if self.store.create(keys.manifest(self.run_id, manifest.version), manifest.to_bytes()):
            return manifest, False
        held = self.reader.manifest(manifest.version)
        if held is None:
            raise BoardError(
                f"version {manifest.version} of run {self.run_id!r} vanished while it was published",
                "check that no other tool deletes from the board",
            )
        return held, True

    def settle(self, manifest: Manifest, root: str, started: float, committed_before: bool) -> PublishReceipt:
        """Check that the committed version is the state with this root digest, and write the hint.

        `started` is a `time.monotonic()`. Raises IntegrityError when the board holds another state, OvertakenError
        when that is the last commit of the writer before this one.
        """
        if manifest.root_digest != root and manifest.epoch < self._options.epoch:
            raise OvertakenError(
                f"version {manifest.version} of run {self.run_id!r} was committed by an earlier writer (epoch "
                f"{manifest.epoch}) while this one (epoch {self._options.epoch}) took the run over",
                "resume the run: it goes on after that version",
            )
        if manifest.root_digest != root:
            raise IntegrityError(
                f"version {manifest.version} of run {self.run_id!r} is on the board with root digest "
                f"{manifest.root_digest}, this state has {root}: the same version number can never mean two states",
                "start a new run, or resume from the state that was published",
            )
        self._hint(manifest.version)
        return PublishReceipt(
            version=manifest.version,
            step=manifest.step,
            kind=manifest.kind,
            sent_bytes=manifest.sent_bytes + len(manifest.to_bytes()),
            full_bytes=manifest.full_bytes,
            changed_share=manifest.changed_share,
            root_digest=manifest.root_digest,
            seconds=time.monotonic() - started,
            already_committed=committed_before,
        )

    def _manifest(self, draft: Draft) -> Manifest:
        blobs = list(draft.blobs)
        files: dict[str, str] = {}
        keyframe_version = draft.version if draft.whole else self.keyframe_of(draft.version)
        keyframe = keyframe_version == draft.version
        if keyframe:
            for name, data in sorted(self._options.files.items()):
                entry = put_blob(self.store, self.run_id, draft.version, data, FILE)
                files[name] = entry.digest
                blobs.append(entry)
        return Manifest(
            run_id=self.run_id,
            version=draft.version,
            base_version=draft.base_version,
            keyframe_version=keyframe_version,
            kind=KEYFRAME if keyframe else "delta",
            step=draft.step,
            dtype=self._options.dtype,
            tensors=draft.tensors,
            removed=draft.removed,
            blobs=blobs,
            root_digest=draft.root,
            base_root_digest=draft.base_root,
            nonce=secrets.token_hex(16),
            writer=self._options.writer,
            epoch=self._options.epoch,
            created_at=time.time(),
            changed_share=draft.changed_share,
            full_bytes=draft.full_bytes,
            sent_bytes=sum(blob.size for blob in blobs),
            files=files,
            extra=draft.extra,
            writers=draft.writers,
        ).signed(self._options.signer)

    def _hint(self, version: int) -> None:
        key = keys.latest(self.run_id)
        try:
            if json.loads(self.store.get(key))["version"] >= version:
                return
        except (MissingKey, ValueError, TypeError, KeyError):
            pass
        self.store.put(key, json.dumps({"version": version, "at": time.time()}).encode())
