"""Ways from what a joiner holds (nothing, or an older version) to a version: keyframes, deltas, merged deltas.

The cheapest is found as a shortest path. A hop costs its bytes over the network and one pass over the weights in
memory (decode, patch, hash), so that a long chain of small deltas can lose to one larger merged delta or a keyframe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sprawl.board import keys
from sprawl.board.manifest import DELTA, KEYFRAME
from sprawl.board.merged import MergedRecord, read_merged
from sprawl.errors import BoardError, IntegrityError

if TYPE_CHECKING:
    from sprawl.board.reader import VersionReader

BANDWIDTH = 125e6
"""Bytes a second that a hop's blobs are assumed to arrive with: 1 Gbit/s, a modest link between two clouds."""
PASS_RATE = 1e9
"""Bytes a second of one pass over the weights; benchmarks/late_join.py measures it."""


NEAR = 8
"""Versions that a joiner may step up to where a merged delta begins."""


@dataclass(frozen=True)
class Hop:
    """One step: a keyframe (`base` None), a delta, or a merged delta (`record`). `bytes` to fetch."""

    kind: str  # keyframe | delta
    base: int | None
    version: int
    bytes: int
    record: MergedRecord | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Route:
    """Hops in order. `seconds` is the estimate it was chosen by."""

    hops: tuple[Hop, ...]
    seconds: float

    @property
    def bytes(self) -> int:
        """To fetch, over all hops."""
        return sum(hop.bytes for hop in self.hops)


def hop_seconds(size: int, full_bytes: int) -> float:
    """Estimated cost of a hop that fetches `size` bytes to patch a state of `full_bytes`."""
    return size / BANDWIDTH + full_bytes / PASS_RATE


def plan(hops: Iterable[Hop], start: int | None, target: int, full_bytes: int) -> Route | None:
    """The cheapest way from version `start` (None: from nothing) to `target`; None when there is no way.

    Hops lead from lower to higher versions only, so one pass in the order of the versions settles all of them.
    """
    best: dict[int | None, Route] = {start: Route((), 0.0)}
    if start is not None:
        best[None] = Route((), 0.0)  # a keyframe needs nothing
    for hop in sorted(hops, key=lambda hop: (hop.version, hop.bytes)):
        before = best.get(hop.base)
        if before is None:
            continue
        seconds = before.seconds + hop_seconds(hop.bytes, full_bytes)
        held = best.get(hop.version)
        if held is None or seconds < held.seconds:
            best[hop.version] = Route((*before.hops, hop), seconds)
    return best.get(target)


def find(reader: VersionReader, start: int | None, target: int, closed: set[Hop]) -> Route:
    """The cheapest route on the board that avoids the hops in `closed`.

    Raises BoardError when `target` is not on the board or nothing leads to it.
    """
    hops, full_bytes = survey(reader, start, target, thorough=bool(closed))
    route = plan((hop for hop in hops if hop not in closed), start, target, full_bytes)
    if route is None:
        raise BoardError(
            f"version {target} of run {reader.run_id!r} on board {reader.store.url} cannot be rebuilt: no keyframe and "
            "chain of deltas leads to it",
            "sprawl board verify names what is missing",
        )
    return route


def reachable(reader: VersionReader, start: int | None, target: int, closed: set[Hop]) -> bool:
    """Whether `find` would find a route."""
    try:
        find(reader, start, target, closed)
    except BoardError:
        return False
    return True


def survey(reader: VersionReader, start: int | None, target: int, *, thorough: bool = False) -> tuple[list[Hop], int]:
    """Hops worth considering, and the size of the state. Walks down from `target`.

    The walk ends at `start`, or once the chain alone costs more than coming from a keyframe that was passed;
    `thorough` goes on, for when that keyframe turned out to be lost.
    """
    manifest = reader.require(target)
    full_bytes = manifest.full_bytes
    hops: list[Hop] = []
    chain, enough = 0.0, float("inf")
    seen = {target, *({start} if start is not None else ())}
    while True:
        version = manifest.version
        seen.add(version)
        if manifest.parts(KEYFRAME):
            size = manifest.bytes_of(KEYFRAME)
            hops.append(Hop(KEYFRAME, None, version, size))
            enough = min(enough, chain + hop_seconds(size, full_bytes))
        if version == start or manifest.base_version is None or not manifest.parts(DELTA):
            break
        size = manifest.bytes_of(DELTA)
        hops.append(Hop(DELTA, manifest.base_version, version, size))
        chain += hop_seconds(size, full_bytes)
        if not thorough and enough < float("inf") and (start is None or chain >= enough):
            break
        below = reader.manifest(manifest.base_version)
        if below is None:
            break
        manifest = below
    pairs = [(base, version) for base, version in merged_pairs(reader) if version in seen]
    if start is not None:
        hops += _approach(reader, start, {base for base, _ in pairs}, seen)
    return hops + _merged_hops(reader, pairs, seen), full_bytes


def _approach(reader: VersionReader, start: int, bases: set[int], seen: set[int]) -> list[Hop]:
    """Deltas from `start` to the merged deltas that begin a little above it; `seen` is extended."""
    hops: list[Hop] = []
    near = max((base for base in bases - seen if start < base <= start + NEAR), default=start)
    for version in range(start + 1, near + 1):
        manifest = reader.manifest(version)
        if manifest is None or manifest.base_version != version - 1:
            break
        hops.append(Hop(DELTA, version - 1, version, manifest.bytes_of(DELTA)))
        seen.add(version)
    return hops


def _merged_hops(reader: VersionReader, pairs: list[tuple[int, int]], seen: set[int]) -> list[Hop]:
    hops = []
    for base, version in pairs:
        if base in seen:
            try:
                record = read_merged(reader, base, version)
            except IntegrityError:
                continue  # an optional short cut that cannot be trusted; `verify` reports it
            if record is not None:
                hops.append(Hop(DELTA, base, version, record.bytes, record))
    return hops


def merged_pairs(reader: VersionReader) -> list[tuple[int, int]]:
    """(base, version) of the merged deltas on the board, ascending."""
    pairs = []
    for name in reader.store.children(keys.merged_root(reader.run_id)):
        base, _, version = name.removesuffix(".json").partition("-")
        if name.endswith(".json") and base.isdecimal() and version.isdecimal():
            pairs.append((int(base), int(version)))
    return sorted(pairs)
