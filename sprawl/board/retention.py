"""Retention: delete old versions, never one that is still needed.

Kept is always one unbroken range that starts at a keyframe and ends at the newest version, so that every version
left can be rebuilt. Manifests go before blobs: a version is either whole or not there.

Of the anchor's sign maps (one bit a parameter each) those stay that a run takes which resumes from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sprawl.board import keys
from sprawl.board.ledger import Ledger, is_live
from sprawl.board.manifest import KEYFRAME, Manifest
from sprawl.board.reader import VersionReader, nothing_published
from sprawl.board.store import Store
from sprawl.errors import BoardError

_ABANDONED_S = 3600.0  # age after which a temporary file belongs to a dead writer


@dataclass(frozen=True)
class GcPlan:
    """Delete `versions`, keep from `keep_from` on; `reason` says what holds the oldest kept version."""

    versions: list[int]
    keep_from: int
    reason: str


@dataclass(frozen=True)
class GcReport:
    """What `gc` deleted, or would delete (`dry_run`)."""

    plan: GcPlan
    blobs: int
    bytes: int
    dry_run: bool


def plan_gc(
    versions: Sequence[int],
    keyframes: Sequence[int],
    applied: Sequence[int],
    keep_versions: int,
    promoted: Sequence[int] = (),
) -> GcPlan:
    """Which versions may go: all before the keyframe of the oldest one that is needed.

    Needed are the newest `keep_versions`, what live islands serve (`applied`) and what people promoted (`promoted`).
    `versions` and `keyframes` (a subset) are on the board. Raises ValueError when `keep_versions` < 1 or nothing is
    published.
    """
    if keep_versions < 1 or not versions:
        raise ValueError("retention needs published versions and keeps at least one")
    ordered = sorted(versions)
    oldest, reason = ordered[-keep_versions:][0], f"the newest {keep_versions} versions are kept"
    behind = min((version for version in applied if version >= ordered[0]), default=oldest)
    if behind < oldest:
        oldest, reason = behind, f"a live island serves version {behind}"
    chosen = min((version for version in promoted if version >= ordered[0]), default=oldest)
    if chosen < oldest:
        oldest, reason = chosen, f"version {chosen} was promoted"
    start = max((keyframe for keyframe in keyframes if keyframe <= oldest), default=ordered[0])
    if start < oldest:
        reason += f", which needs keyframe {start}"
    return GcPlan([version for version in ordered if version < start], start, reason)


def gc(store: Store, run_id: str, keep_versions: int, *, dry_run: bool = False) -> GcReport:
    """Apply `plan_gc` to a run. Interrupted, it leaves a valid board, and the next call finishes the work.

    Also removes blobs that no manifest names, left by interrupted publishes or an interrupted gc, merged deltas to
    versions that are gone, and sign maps that no resumed run takes or no fire names.
    """
    if keep_versions < 1:
        raise BoardError(f"cannot keep {keep_versions} versions", "keep at least 1")
    reader = VersionReader(store, run_id)
    manifests = {version: manifest for version in reader.versions() if (manifest := reader.manifest(version))}
    if not manifests:
        raise nothing_published(run_id, store.url)
    ledger = Ledger(store, run_id)
    islands = [island.applied for island in ledger.islands() if is_live(island)]
    plan = plan_gc(
        list(manifests),
        [version for version, manifest in manifests.items() if manifest.kind == KEYFRAME],
        [version for version in islands if version is not None],
        keep_versions,
        [record.version for record in ledger.promotions() if record.approved],
    )
    # Blobs are listed after the manifests: what a publish in flight wrote for a newer version is above `newest`.
    newest = max(manifests)
    doomed = [key for key in store.list(keys.blob_root(run_id)) if _deletable(key, run_id, plan, manifests, newest)]
    records, merged = _merged_objects(store, run_id, plan.keep_from)
    doomed += merged
    doomed += _sign_maps(store, ledger)
    freed = sum(manifests[version].sent_bytes for version in plan.versions)
    if not dry_run:
        # Oldest keyframe first, and of what stands on it the newest first: each version still there can be rebuilt.
        for version in sorted(plan.versions, key=lambda version: (manifests[version].keyframe_version, -version)):
            store.delete(keys.manifest(run_id, version))
        for key in records:
            store.delete(key)
        for key in doomed:
            store.delete(key)
        store.sweep(f"{run_id}/", _ABANDONED_S)
    return GcReport(plan, len(doomed), freed, dry_run)


def _merged_objects(store: Store, run_id: str, keep_from: int) -> tuple[list[str], list[str]]:
    """Records and blobs of merged deltas that end before the first kept version. One that starts there may stay: a
    joiner can hold a version that the board no longer has."""
    records: list[str] = []
    blobs: list[str] = []
    for key in store.list(keys.merged_root(run_id)):
        pair = key.removeprefix(keys.merged_root(run_id)).partition("/")[0].removesuffix(".json")
        end = pair.partition("-")[2]
        if end.isdecimal() and int(end) < keep_from:
            (records if key.endswith(".json") else blobs).append(key)
    return records, blobs


def _sign_maps(store: Store, ledger: Ledger) -> list[str]:
    """Sign maps and bases of committed fires that are not needed any more, or that their fire does not name. A fire
    without a record may be under way: what it wrote stays."""
    fires = {fire.step: fire for fire in ledger.fires()}
    oldest = _oldest_needed_fire(ledger, fires)
    doomed: list[str] = []
    for root in (keys.sign_maps(ledger.run_id), keys.all_bases(ledger.run_id)):
        for key in store.list(root):
            number, _, digest = key.removeprefix(root).partition("-")
            record = fires.get(int(number)) if number.isdecimal() else None
            if record is not None and (record.step < oldest or digest not in (record.digest, record.basis_digest)):
                doomed.append(key)
    return doomed


def _oldest_needed_fire(ledger: Ledger, fires: Iterable[int]) -> int:
    """The fire whose sign map the step after the oldest checkpoint took; without a record of that step, the newest one
    that it can take. 0 without checkpoints: all are needed."""
    checkpoints = ledger.checkpoints()
    if not checkpoints:
        return 0
    taken = ledger.step(min(checkpoints) + 1)
    if taken is not None and taken.sign_fire is not None:
        return taken.sign_fire
    return max((step for step in fires if step <= min(checkpoints)), default=0)


def _deletable(key: str, run_id: str, plan: GcPlan, manifests: dict[int, Manifest], newest: int) -> bool:
    folder, _, digest = key.removeprefix(keys.blob_root(run_id)).partition("/")
    if not folder.isdecimal() or int(folder) > newest:
        return False
    version = int(folder)
    if version < plan.keep_from:
        return True
    manifest = manifests.get(version)
    return manifest is not None and digest not in {blob.digest for blob in manifest.blobs}
