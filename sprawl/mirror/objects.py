"""Which objects of a board a mirror relays, and what their keys alone say about them. Pure functions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sprawl.board import keys

ROUTE = "/v1/objects/"
MAX_WAIT_S = 30.0  # longest that a mirror holds a request for an object that is not there yet

_RUN = r"(?P<run>[^/.\0][^/\0]*)"
_BLOB = re.compile(rf"{_RUN}/(?:blobs/\d+|merged/\d+-\d+)/(?P<digest>[0-9a-f]{{64}})")
_MANIFEST = re.compile(rf"{_RUN}/manifests/(?P<version>\d{{8,}})\.json")
_MERGED = re.compile(rf"{_RUN}/merged/\d+-\d+\.json")
_LATEST = re.compile(rf"{_RUN}/{re.escape(keys.LATEST)}")


@dataclass(frozen=True)
class BlobKey:
    """Named by the blake3 of its bytes: whoever delivers it can be checked."""

    key: str
    digest: str


@dataclass(frozen=True)
class ManifestKey:
    """Immutable, but nothing in the name vouches for the content: only a signature does."""

    key: str
    run_id: str
    version: int

    @property
    def following(self) -> ManifestKey:
        """The key of the next version."""
        return ManifestKey(keys.manifest(self.run_id, self.version + 1), self.run_id, self.version + 1)


def parse(key: str) -> BlobKey | ManifestKey | None:
    """What a mirror may relay under this key; None for everything else, which comes from the board only."""
    if match := _BLOB.fullmatch(key):
        return BlobKey(key, match["digest"])
    if match := _MANIFEST.fullmatch(key):
        found = ManifestKey(key, match["run"], int(match["version"]))
        return found if key == keys.manifest(found.run_id, found.version) else None
    return None


def is_merged_record(key: str) -> bool:
    """Whether the key is that of the commit record of a merged delta."""
    return _MERGED.fullmatch(key) is not None


def is_hint(key: str) -> bool:
    """Whether the key is that of a run's latest.json."""
    return _LATEST.fullmatch(key) is not None


def blob_sizes(record: bytes) -> Iterator[tuple[str, int]]:
    """(digest, bytes) of the blobs that a commit record names; nothing when it cannot be read (readers will say so)."""
    try:
        for blob in json.loads(record)["blobs"]:
            if isinstance(blob["digest"], str) and isinstance(blob["size"], int):
                yield blob["digest"], blob["size"]
    except (ValueError, KeyError, TypeError):
        return


def wait_of(prefer: str) -> float | None:
    """Seconds of `Prefer: wait=N` (RFC 7240), at most MAX_WAIT_S; None without one."""
    for preference in prefer.split(","):
        name, _, value = preference.strip().partition("=")
        if name.strip().lower() == "wait" and re.fullmatch(r"\d{1,6}(\.\d{1,3})?", value.strip()):
            return min(float(value), MAX_WAIT_S)
    return None
