"""Rebuild every version on a board and check it bit for bit against its manifest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sprawl.board.manifest import DELTA, FILE, KEYFRAME, Manifest
from sprawl.board.merged import read_merged
from sprawl.board.reader import Served, VersionReader, nothing_published
from sprawl.board.routes import merged_pairs
from sprawl.board.signing import Trust
from sprawl.board.store import MissingKey, Store
from sprawl.delta.state import clone_state
from sprawl.errors import BoardError, IntegrityError


@dataclass(frozen=True)
class VerifyReport:
    """`versions` counts the rebuilt ones whose root digest is the published one, out of `published` manifests."""

    run_id: str
    published: int
    versions: int
    keyframes: int
    bytes_read: int
    merged: int = 0  # merged deltas that arrive at the published state
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and self.versions == self.published


def verify_board(
    store: Store,
    run_id: str,
    progress: Callable[[int, int], None] | None = None,
    *,
    trust: Trust | None = None,
) -> VerifyReport:
    """Rebuild the whole chain of a run; at every keyframe the chain so far must equal the keyframe, and every merged
    delta whose base is still on the board must arrive at the published state.

    Damage becomes a line in `problems` and the check goes on at the next keyframe. `progress(done, total)` is called
    after every version. With `trust`, unsigned records are damage. Raises BoardError when the run has published
    nothing.
    """
    reader = VersionReader(store, run_id, trust=trust)
    versions = reader.versions()
    if not versions:
        raise nothing_published(run_id, store.url)
    problems = [
        f"version {version} is missing (there are {versions[0]} to {versions[-1]})"
        for version in sorted(set(range(versions[0], versions[-1] + 1)) - set(versions))
    ]
    served: Served | None = None
    pairs = merged_pairs(reader)
    verified = keyframes = merged = 0
    for done, version in enumerate(versions, start=1):
        try:
            manifest = reader.manifest(version)
            if manifest is None:
                raise BoardError(f"version {version} was deleted during the check")
            keyframes += manifest.kind == KEYFRAME
            served = _rebuild(reader, served, manifest)
            verified += 1
            for base, end in pairs:
                if base == version:
                    merged += _check_merged(reader, served, base, end, problems)
        except (IntegrityError, BoardError) as error:
            problems.append(f"version {version}: {error.message}")
            served = None
        if progress is not None:
            progress(done, len(versions))
    return VerifyReport(run_id, len(versions), verified, keyframes, reader.bytes_read, merged, problems)


def _rebuild(reader: VersionReader, served: Served | None, manifest: Manifest) -> Served:
    """The state of `manifest`, through every route the board offers: the delta and, if it is one, the keyframe."""
    _check_listing(manifest)
    connected = served is not None and served.version + 1 == manifest.version and manifest.base_version is not None
    if served is not None and connected:
        reader.commit(served, reader.prepare_delta(served, manifest))
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


def _check_merged(reader: VersionReader, served: Served, base: int, end: int, problems: list[str]) -> bool:
    """Whether a merged delta leads to the published state; if not, why is added to `problems`."""
    try:
        record = read_merged(reader, base, end)
        if record is None:
            return False
        scratch = Served(served.version, clone_state(served.state), dict(served.digests), served.root)
        reader.commit(scratch, reader.prepare_merged(scratch, record))
    except (IntegrityError, MissingKey) as error:
        problems.append(f"merged delta {base}-{end}: {error.message}")
        return False
    return True


def _check_listing(manifest: Manifest) -> None:
    if manifest.kind == KEYFRAME and manifest.keyframe_version != manifest.version:
        raise IntegrityError(f"is a keyframe but names version {manifest.keyframe_version} as its keyframe")
    first = manifest.base_version is None and manifest.kind == KEYFRAME
    if not first and (manifest.base_version != manifest.version - 1 or not manifest.parts(DELTA)):
        raise IntegrityError("holds no delta against the version before it")
    missing = set(manifest.files.values()) - {blob.digest for blob in manifest.blobs}
    if missing:
        raise IntegrityError("names files that are not among its blobs")
