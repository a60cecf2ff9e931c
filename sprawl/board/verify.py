"""Rebuild every version on a board and check it bit for bit against its manifest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sprawl.board.manifest import DELTA, FILE, KEYFRAME, Manifest
from sprawl.board.reader import Served, VersionReader
from sprawl.board.store import Store
from sprawl.errors import BoardError, IntegrityError


@dataclass(frozen=True)
class VerifyReport:
    """`versions` counts the rebuilt ones whose root digest is the published one, out of `published` manifests."""

    run_id: str
    published: int
    versions: int
    keyframes: int
    bytes_read: int
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and self.versions == self.published


def verify_board(store: Store, run_id: str, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Rebuild the whole chain of a run; at every keyframe the chain so far must equal the keyframe.

    Damage becomes a line in `problems` and the check goes on at the next keyframe. `progress(done, total)` is called
    after every version. Raises BoardError when the run has published nothing.
    """
    reader = VersionReader(store, run_id)
    versions = reader.versions()
    if not versions:
        raise BoardError(f"run {run_id!r} on board {store.url} has published no version")
    problems = [
        f"version {version} is missing (there are {versions[0]} to {versions[-1]})"
        for version in sorted(set(range(versions[0], versions[-1] + 1)) - set(versions))
    ]
    served: Served | None = None
    verified = keyframes = 0
    for done, version in enumerate(versions, start=1):
        try:
            manifest = reader.manifest(version)
            if manifest is None:
                raise BoardError(f"version {version} was deleted during the check")
            keyframes += manifest.kind == KEYFRAME
            served = _rebuild(reader, served, manifest)
            verified += 1
        except (IntegrityError, BoardError) as error:
            problems.append(f"version {version}: {error.message}")
            served = None
        if progress is not None:
            progress(done, len(versions))
    return VerifyReport(run_id, len(versions), verified, keyframes, reader.bytes_read, problems)


def _rebuild(reader: VersionReader, served: Served | None, manifest: Manifest) -> Served:
    """The state of `manifest`, through every route the board offers: the delta and, if it is one, the keyframe."""
    _check_listing(manifest)
    connected = served is not None and served.version + 1 == manifest.version
    if served is not None and connected:
        reader.advance(served, manifest.version)
    if manifest.kind == KEYFRAME:
        for entry in manifest.blobs:
            if entry.role == FILE:
                reader.blob(manifest.version, entry)
        whole = reader.keyframe(manifest.version)
        if served is not None and connected and whole.digests != served.digests:
            raise IntegrityError("the chain of deltas and the keyframe are different states")
        return whole
    if served is None or not connected:
        raise IntegrityError(f"cannot be rebuilt, because version {manifest.version - 1} could not be")
    return served


def _check_listing(manifest: Manifest) -> None:
    if manifest.kind == KEYFRAME and manifest.keyframe_version != manifest.version:
        raise IntegrityError(f"is a keyframe but names version {manifest.keyframe_version} as its keyframe")
    if manifest.version > 0 and (manifest.base_version != manifest.version - 1 or manifest.blob(DELTA) is None):
        raise IntegrityError("holds no delta against the version before it")
    missing = set(manifest.files.values()) - {blob.digest for blob in manifest.blobs}
    if missing:
        raise IntegrityError("names files that are not among its blobs")
