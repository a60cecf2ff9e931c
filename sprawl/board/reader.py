"""Following a run's versions: find the newest, rebuild any, step from one to the next; every byte verified."""

from __future__ import annotations

import json
from dataclasses import dataclass

from blake3 import blake3

from sprawl.board import keys
from sprawl.board.manifest import DELTA, FILE, KEYFRAME, BlobEntry, Manifest
from sprawl.board.store import MissingKey, Store
from sprawl.delta.codec import Overwrites, apply, decode, decode_whole
from sprawl.delta.state import State, root_digest, tensor_digest, tensor_digests
from sprawl.errors import BoardError, IntegrityError


@dataclass
class Served:
    """A state in memory that is exactly `version`. `root` is empty after a failed commit: the state is then void."""

    version: int
    state: State
    digests: dict[str, str]
    root: str


@dataclass(frozen=True)
class Prepared:
    """A verified, decoded step from one version to a later one. Nothing was touched yet."""

    version: int
    base_version: int
    base_root: str
    manifest: Manifest
    overwrites: Overwrites
    bytes: int

    @property
    def changed(self) -> list[str]:
        """Names of the tensors that the commit writes, sorted."""
        return self.overwrites.changed


class VersionReader:
    """Reads one run's versions. Not thread-safe; `bytes_read` counts blob bytes fetched so far."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store = store
        self.run_id = run_id
        self.bytes_read = 0
        self._head: int | None = None

    def manifest(self, version: int) -> Manifest | None:
        """The manifest of a version; None when it is not published (or was deleted by retention)."""
        key = keys.manifest(self.run_id, version)
        try:
            data = self.store.get(key)
        except MissingKey:
            return None
        manifest = Manifest.from_bytes(data, key)
        if manifest.version != version or manifest.run_id != self.run_id:
            raise IntegrityError(f"{key} is the manifest of version {manifest.version} of run {manifest.run_id!r}")
        return manifest

    def versions(self) -> list[int]:
        """All versions on the board, ascending. Lists: not for the hot path."""
        prefix = keys.manifests(self.run_id)
        names = (key.removeprefix(prefix).removesuffix(".json") for key in self.store.list(prefix))
        return sorted(int(name) for name in names if name.isdecimal())

    def head(self) -> int | None:
        """The newest committed version, None when there is none yet.

        Starts from what this reader saw before and from latest.json, then follows version + 1. The hint may be
        missing, stale or corrupt.
        """
        known = self._head
        hint = self._hint()
        if hint is not None and (known is None or hint > known) and self._committed(hint):
            known = hint
        if known is None or not self._committed(known):
            known = max(self.versions(), default=None)
        while known is not None and self._committed(known + 1):
            known += 1
        self._head = known
        return known

    def files(self) -> dict[str, bytes]:
        """config.json, tokenizer.json ... as of the newest version. Raises BoardError when nothing is published."""
        head = self._require_head()
        manifest = self._require(self._require(head).keyframe_version)
        entries = {blob.digest: blob for blob in manifest.blobs if blob.role == FILE}
        return {name: self.blob(manifest.version, entries[digest]) for name, digest in manifest.files.items()}

    def blob(self, version: int, entry: BlobEntry) -> bytes:
        """A blob's bytes. Raises IntegrityError naming it when they are not what the manifest promised."""
        key = keys.blob(self.run_id, version, entry.digest)
        data = self.store.get(key)
        self.bytes_read += len(data)
        if len(data) != entry.size:
            raise IntegrityError(f"{key} has {len(data)} bytes, its manifest says {entry.size}")
        if blake3(data).hexdigest() != entry.digest:
            raise IntegrityError(f"{key} is damaged: its bytes do not have the digest it is named by")
        return data

    def materialise(self, version: int) -> Served:
        """Rebuild a version from its keyframe and the deltas after it; each step is checked against its root digest.

        Raises BoardError when the version is not on the board (or no longer), IntegrityError when it is damaged.
        """
        served = self.keyframe(self._require(version).keyframe_version)
        while served.version < version:
            self.commit(served, self._prepare_delta(served, self._require(served.version + 1)))
        return served

    def keyframe(self, version: int) -> Served:
        """The whole state stored at a keyframe, checked against the root digest."""
        manifest = self._require(version)
        entry = manifest.blob(KEYFRAME)
        if entry is None:
            raise IntegrityError(f"version {version} of run {self.run_id!r} is not a keyframe")
        state = decode_whole(self.blob(version, entry), keys.blob(self.run_id, version, entry.digest))
        digests = tensor_digests(state)
        root = root_digest(digests)
        if root != manifest.root_digest:
            raise self._mismatch(manifest, root, digests)
        return Served(version, state, digests, root)

    def prepare(self, served: Served, version: int) -> Prepared:
        """Fetch, verify and decode what turns `served` into `version`; touches nothing.

        The next version is one delta. A later one, or a next one whose delta retention deleted meanwhile, is rebuilt
        from its keyframe and becomes the overwrites of the tensors that differ.

        Raises BoardError when the version is not on the board, IntegrityError when bytes are damaged or `served` is
        not the state the delta was made for.
        """
        if version <= served.version:
            raise ValueError(f"version {version} is not newer than the served version {served.version}")
        manifest = self._require(version)
        if version == served.version + 1:
            try:
                return self._prepare_delta(served, manifest)
            except MissingKey:
                # Retention deletes manifests before blobs: it is running between our two reads.
                pass
        return self._prepare_jump(served, manifest)

    def commit(self, served: Served, prepared: Prepared) -> None:
        """Patch `served` in place and compare the root digest of the result.

        Raises IntegrityError when `prepared` was made for another state (nothing touched), or when the result is
        not the published state: `served` is then void (`root` empty) and must be thrown away.
        """
        if served.version != prepared.base_version or served.root != prepared.base_root:
            raise IntegrityError(
                f"version {prepared.version} was prepared for version {prepared.base_version}, "
                f"the state to patch is version {served.version}"
            )
        served.root = ""
        apply(served.state, prepared.overwrites)
        for name in prepared.changed:
            served.digests[name] = tensor_digest(served.state[name])
        for name in prepared.overwrites.removed:
            served.digests.pop(name, None)
        root = root_digest(served.digests)
        if root != prepared.manifest.root_digest:
            raise self._mismatch(prepared.manifest, root, served.digests)
        served.version, served.root = prepared.version, root

    def advance(self, served: Served, target: int) -> None:
        """Step `served` to `target`, version by version; jumps where the chain is gone."""
        while served.version < target:
            following = served.version + 1
            if following < target and not self._committed(following):
                following = target
            self.commit(served, self.prepare(served, following))

    def _prepare_delta(self, served: Served, manifest: Manifest) -> Prepared:
        entry = manifest.blob(DELTA)
        if entry is None or manifest.base_version != served.version:
            raise IntegrityError(
                f"version {manifest.version} of run {self.run_id!r} holds no delta against version {served.version}"
            )
        if manifest.base_root_digest != served.root:
            raise IntegrityError(
                f"version {manifest.version} applies to version {served.version} with root digest "
                f"{manifest.base_root_digest}, the state here has {served.root or 'none (void)'}"
            )
        data = self.blob(manifest.version, entry)
        key = keys.blob(self.run_id, manifest.version, entry.digest)
        overwrites = decode(served.state, data, name=key)
        return Prepared(manifest.version, served.version, served.root, manifest, overwrites, len(data))

    def _prepare_jump(self, served: Served, manifest: Manifest) -> Prepared:
        before = self.bytes_read
        target = self.materialise(manifest.version)
        changed = {name: t for name, t in target.state.items() if served.digests.get(name) != target.digests[name]}
        removed = sorted(set(served.state) - set(target.state))
        overwrites = Overwrites(whole=changed, removed=removed)
        size = self.bytes_read - before
        return Prepared(manifest.version, served.version, served.root, manifest, overwrites, size)

    def _mismatch(self, manifest: Manifest, root: str, digests: dict[str, str]) -> IntegrityError:
        wrong = sorted(
            name for name, entry in manifest.tensors.items() if not digests.get(name, "").startswith(entry.digest)
        )
        tensors = f"; wrong tensors: {', '.join(wrong[:5])}" if wrong else ""
        return IntegrityError(
            f"version {manifest.version} of run {self.run_id!r} was published with root digest "
            f"{manifest.root_digest}, the rebuilt state has {root}{tensors}"
        )

    def _committed(self, version: int) -> bool:
        return self.store.exists(keys.manifest(self.run_id, version))

    def _hint(self) -> int | None:
        try:
            hint = json.loads(self.store.get(keys.latest(self.run_id)))["version"]
        except (MissingKey, ValueError, TypeError, KeyError):
            return None
        return hint if isinstance(hint, int) and hint >= 0 else None

    def _require_head(self) -> int:
        head = self.head()
        if head is None:
            raise BoardError(f"run {self.run_id!r} on board {self.store.url} has published no version yet")
        return head

    def _require(self, version: int) -> Manifest:
        manifest = self.manifest(version)
        if manifest is None:
            versions = self.versions()
            there = f"it has {versions[0]} to {versions[-1]}" if versions else "it has none"
            raise BoardError(f"run {self.run_id!r} on board {self.store.url} has no version {version}: {there}")
        return manifest
