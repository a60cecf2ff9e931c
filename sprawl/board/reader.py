"""Following a run's versions: find the newest, rebuild any, step from one to the next; every byte verified."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass

from blake3 import blake3

from sprawl.board import keys, routes
from sprawl.board.manifest import DELTA, KEYFRAME, BlobEntry, Manifest
from sprawl.board.merged import MergedRecord
from sprawl.board.signing import Trust
from sprawl.board.store import MissingKey, Store
from sprawl.delta.codec import Overwrites, apply, decode, decode_whole
from sprawl.delta.compose import combine, compose, restrict
from sprawl.delta.state import State, clone_state, root_digest, tensor_digest, tensor_digests
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


def nothing_published(run_id: str, board: str) -> BoardError:
    return BoardError(
        f"run {run_id!r} on board {board} has published no version",
        "`sprawl board ls` shows the runs of a board and their newest versions",
    )


class VersionReader:
    """Reads one run's versions. Not thread-safe; `bytes_read` counts blob bytes fetched so far.

    With `trust`, manifests and merged deltas that none of its keys signed are refused (SignatureProblem).
    """

    def __init__(self, store: Store, run_id: str, *, trust: Trust | None = None) -> None:
        self.store = store
        self.run_id = run_id
        self.trust = trust
        self.bytes_read = 0
        self._head: int | None = None

    def manifest(self, version: int) -> Manifest | None:
        """The manifest of a version; None when it is not published (or was deleted by retention)."""
        key = keys.manifest(self.run_id, version)
        try:
            data = self.store.get(key)
        except MissingKey:
            return None
        manifest = Manifest.from_bytes(data, key, self.trust)
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
        return self.files_of(self.require(self.require_head()))

    def files_of(self, manifest: Manifest) -> dict[str, bytes]:
        """The files that go with a version: those of its keyframe. Raises BoardError when that is gone."""
        keyframe = self.require(manifest.keyframe_version)
        return {name: self.blob(keyframe.version, entry) for name, entry in keyframe.file_blobs().items()}

    def blob(self, version: int, entry: BlobEntry) -> bytes:
        """A blob's bytes. Raises IntegrityError naming it when they are not what the manifest promised."""
        return self._checked(keys.blob(self.run_id, version, entry.digest), entry)

    def _checked(self, key: str, entry: BlobEntry) -> bytes:
        data = self.store.get(key)
        self.bytes_read += len(data)
        if len(data) != entry.size:
            raise IntegrityError(f"{key} has {len(data)} bytes, its manifest says {entry.size}")
        found = blake3(data).hexdigest()
        if found != entry.digest:
            raise IntegrityError(f"{key} is damaged: its bytes have digest {found}, not the one it is named by")
        return data

    def materialise(self, version: int) -> Served:
        """Rebuild a version by the cheapest route the board offers: from a keyframe, over deltas and merged deltas.
        Every step is checked against its root digest.

        Raises BoardError when the version is not on the board (or no longer), IntegrityError when it is damaged.
        """
        return self._travel(None, version, [])

    def keyframe(self, version: int) -> Served:
        """The whole state stored at a keyframe, checked against the root digest."""
        manifest = self.require(version)
        entries = manifest.parts(KEYFRAME)
        if not entries:
            raise IntegrityError(f"version {version} of run {self.run_id!r} is not a keyframe")
        state: State = {}
        for entry in entries:
            part = decode_whole(self.blob(version, entry), keys.blob(self.run_id, version, entry.digest))
            twice = sorted(set(state) & set(part))
            if twice:
                raise IntegrityError(f"version {version}: tensor {twice[0]!r} is in the keyframes of two writers")
            state.update(part)
        digests = tensor_digests(state)
        root = root_digest(digests)
        if root != manifest.root_digest:
            raise self._mismatch(manifest, root, digests)
        return Served(version, state, digests, root)

    def prepare(self, served: Served, version: int) -> Prepared:
        """Fetch, verify and decode what turns `served` into `version`; touches nothing.

        The next version is one delta. A later one, or a next one whose delta retention deleted meanwhile, comes by the
        cheapest route: a merged delta, the chain, or a keyframe. More than one step is taken on a copy of the state.

        Raises BoardError when the version is not on the board, IntegrityError when bytes are damaged or `served` is
        not the state the delta was made for.
        """
        if version <= served.version:
            raise ValueError(f"version {version} is not newer than the served version {served.version}")
        if version == served.version + 1:
            manifest = self.require(version)
            try:
                if manifest.base_version is not None:  # None: published whole, as adapters are
                    return self.prepare_delta(served, manifest)
            except MissingKey:
                # Retention deletes manifests before blobs: it is running between our two reads.
                pass
        return self._prepare_jump(served, version)

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

    def check(self, served: Served, prepared: Prepared) -> None:
        """Raises IntegrityError when the commit would not give the published state. Touches nothing; copies one tensor
        at a time."""
        digests = dict(served.digests)
        for name in prepared.overwrites.removed:
            digests.pop(name, None)
        for name in prepared.changed:
            scratch = {name: served.state[name].clone()} if name in served.state else {}
            apply(scratch, restrict(prepared.overwrites, {name}))
            digests[name] = tensor_digest(scratch[name])
        root = root_digest(digests)
        if root != prepared.manifest.root_digest:
            raise self._mismatch(prepared.manifest, root, digests)

    def advance(self, served: Served, target: int) -> None:
        """Step `served` to `target`, version by version; jumps where the chain is gone."""
        while served.version < target:
            following = served.version + 1
            if following < target and not self._committed(following):
                following = target
            self.commit(served, self.prepare(served, following))

    def prepare_delta(self, served: Served, manifest: Manifest) -> Prepared:
        """As `prepare`, by the version's own delta and no other way; raises MissingKey when that is gone."""
        entries = manifest.parts(DELTA)
        if not entries or manifest.base_version != served.version:
            raise IntegrityError(
                f"version {manifest.version} of run {self.run_id!r} holds no delta against version {served.version}"
            )
        self._check_base(manifest.version, manifest.base_root_digest, served)
        found = []
        for entry in entries:
            key = keys.blob(self.run_id, manifest.version, entry.digest)
            found.append(decode(served.state, self.blob(manifest.version, entry), name=key))
        overwrites = found[0]
        if len(found) > 1 or manifest.removed:
            gone = Overwrites(removed=[name for name in manifest.removed if name not in overwrites.removed])
            overwrites = combine([*found, gone], keys.manifest(self.run_id, manifest.version))
        size = sum(entry.size for entry in entries)
        return Prepared(manifest.version, served.version, served.root, manifest, overwrites, size)

    def prepare_merged(self, served: Served, record: MergedRecord) -> Prepared:
        """Fetch, verify and decode a merged delta; touches nothing. Raises as `prepare`."""
        manifest = self.require(record.version)
        name = keys.merged(self.run_id, record.base_version, record.version)
        if record.base_version != served.version:
            raise IntegrityError(f"{name} starts at version {record.base_version}, not at {served.version}")
        if manifest.root_digest != record.root_digest:
            raise IntegrityError(
                f"{name} ends at root digest {record.root_digest}, version {record.version} was published with "
                f"{manifest.root_digest}"
            )
        self._check_base(record.version, record.base_root_digest, served)
        found = []
        for entry in record.blobs:
            key = keys.merged_blob(self.run_id, record.base_version, record.version, entry.digest)
            found.append(decode(served.state, self._checked(key, entry), name=key))
        overwrites = combine([*found, Overwrites(removed=record.removed)], name)
        size = sum(entry.size for entry in record.blobs)
        return Prepared(record.version, served.version, served.root, manifest, overwrites, size)

    def _check_base(self, version: int, base_root: str | None, served: Served) -> None:
        if base_root != served.root:
            raise IntegrityError(
                f"version {version} applies to version {served.version} with root digest {base_root}, the state here "
                f"has {served.root or 'none (void)'}"
            )

    def _travel(self, start: Served | None, version: int, steps: list[Overwrites]) -> Served:
        """Take `start` (changed in place), or nothing, to `version`. `steps` receives what was overwritten; it is
        emptied where the route passes a keyframe. What retention or damage took away is driven around."""
        closed: set[routes.Hop] = set()
        served = start
        while served is None or served.version != version:
            route = routes.find(self, None if served is None else served.version, version, closed)
            for hop in route.hops:
                try:
                    if hop.kind == KEYFRAME:
                        served = self.keyframe(hop.version)
                        steps.clear()
                        continue
                    assert served is not None
                    prepared = (
                        self.prepare_delta(served, self.require(hop.version))
                        if hop.record is None
                        else self.prepare_merged(served, hop.record)
                    )
                except (MissingKey, IntegrityError):
                    closed.add(hop)
                    if not routes.reachable(self, None if served is None else served.version, version, closed):
                        raise
                    break
                steps.append(prepared.overwrites)
                self.commit(served, prepared)
        return served

    def _prepare_jump(self, served: Served, version: int) -> Prepared:
        before = self.bytes_read
        route = routes.find(self, served.version, version, set())
        if len(route.hops) == 1 and route.hops[0].record is not None:
            try:
                return self.prepare_merged(served, route.hops[0].record)
            except (MissingKey, IntegrityError):
                pass  # the routes without it are left
        steps: list[Overwrites] = []
        copy, target = None, None
        if route.hops[0].kind == KEYFRAME:  # a copy would only be thrown away
            with suppress(MissingKey, BoardError, IntegrityError):  # the deltas are left
                target = self._travel(None, version, [])
        if target is None:
            copy = Served(served.version, clone_state(served.state), dict(served.digests), served.root)
            target = self._travel(copy, version, steps)
        if steps and target is copy:
            overwrites = compose(steps)
        else:
            changed = {n: t for n, t in target.state.items() if served.digests.get(n) != target.digests[n]}
            overwrites = Overwrites(whole=changed, removed=sorted(set(served.state) - set(target.state)))
        manifest = self.require(version)
        return Prepared(version, served.version, served.root, manifest, overwrites, self.bytes_read - before)

    def _mismatch(self, manifest: Manifest, root: str, digests: dict[str, str]) -> IntegrityError:
        wrong = [
            f"{name!r} has digest {digests.get(name, 'none: it is missing')}, published {entry.digest}"
            for name, entry in sorted(manifest.tensors.items())
            if not digests.get(name, "").startswith(entry.digest)
        ]
        tensors = f"; wrong tensors ({len(wrong)}): {'; '.join(wrong[:3])}" if wrong else ""
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

    def require_head(self) -> int:
        """As `head`. Raises BoardError when nothing is published."""
        head = self.head()
        if head is None:
            raise nothing_published(self.run_id, self.store.url)
        return head

    def require(self, version: int) -> Manifest:
        """The manifest of a version. Raises BoardError that says which versions there are."""
        manifest = self.manifest(version)
        if manifest is None:
            versions = self.versions()
            there = f"it has {versions[0]} to {versions[-1]}" if versions else "it has none"
            raise BoardError(f"run {self.run_id!r} on board {self.store.url} has no version {version}: {there}")
        return manifest
