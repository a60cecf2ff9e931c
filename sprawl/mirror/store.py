"""A board read through its mirrors. Nothing a mirror says is believed: blobs have to have the digest in their key, and
manifests that come from a mirror have to be signed by a trusted key. Without trusted keys the (small) manifests come
from the board itself, and mirrors only say when to look.

Mutable objects (heartbeats, fencing, run.json) and all writes go to the board; latest.json, a hint, may be `check_s`
old. Whatever goes wrong with a mirror ends in asking the board.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from sprawl.board.signing import SignatureProblem, Trust
from sprawl.board.store import Keys, MissingKey, Store
from sprawl.mirror.choice import Choice
from sprawl.mirror.client import WRONG_REST_S, Mirror, MirrorProblem
from sprawl.mirror.objects import BlobKey, ManifestKey, blob_sizes, is_hint, is_merged_record, parse
from sprawl.mirror.registry import check_name
from sprawl.mirror.watch import Watch

CHECK_S = 15.0
ATTEMPTS = 2  # mirrors that are asked for a blob before the board is
MAX_SIZES = 4096
MAX_RECENT = 8  # manifests and hints held for `check_s`


def through_mirrors(board: Store, region: str | None, trust: Trust | None) -> Store:
    """The board read through the mirrors of a region, with the token of $SPRAWL_MIRROR_TOKEN; the board itself without
    a region. Raises SprawlError when the region is no name."""
    if region is None:
        return board
    token = os.environ.get("SPRAWL_MIRROR_TOKEN") or None
    return MirroredStore(board, check_name(region, "--region"), trust=trust, token=token)


class MirroredStore:
    """A Store, see `sprawl.board.store`. Thread-safe. `region`: mirrors there are asked first. `token` is the mirrors'
    own secret. `notify` is called, in another thread, when a new version is there.

    A mirror that is silent about new versions delays them by `check_s` at most, and after two of them it is left alone;
    a blob that a mirror sends at less than `slowest` bytes per second is fetched from the board.
    """

    def __init__(
        self,
        board: Store,
        region: str,
        *,
        trust: Trust | None = None,
        token: str | None = None,
        notify: Callable[[], object] | None = None,
        check_s: float = CHECK_S,
        slowest: float = 1e6,
    ) -> None:
        self.board = board
        self.url = board.url
        self.notify = notify
        self.mirror_bytes = 0  # of blobs and manifests that came from mirrors
        self.board_reads = 0  # objects asked of the board
        self._trust = trust
        self._check_s = check_s
        self._choice = Choice(board, region, secrets.token_hex(8), token=token, slowest=slowest)
        self._watches: dict[str, Watch] = {}
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._recent: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        match parse(key):
            case BlobKey() as blob:
                return self._blob(blob)
            case ManifestKey() as manifest:
                return self._manifest(manifest)
        if is_hint(key):
            held = self._held(key)
            return held if held is not None else self._hold(key, self._ask_board(key))
        data = self._ask_board(key)
        if is_merged_record(key):
            self._note_sizes(data)
        return data

    def exists(self, key: str) -> bool:
        parsed = parse(key)
        if not isinstance(parsed, ManifestKey):
            return self.board.exists(key)
        try:
            self._manifest(parsed)
        except MissingKey:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        self._forget(key)
        self.board.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._forget(key)
        return self.board.create(key, data)

    def list(self, prefix: str) -> Keys:
        return self.board.list(prefix)

    def children(self, prefix: str) -> Keys:
        return self.board.children(prefix)

    def delete(self, key: str) -> None:
        self._forget(key)
        self.board.delete(key)

    def sweep(self, prefix: str, older_than_s: float) -> int:
        return self.board.sweep(prefix, older_than_s)

    def close(self) -> None:
        """Stop waiting for versions. The board stays open."""
        self.notify = None
        with self._lock:
            for watch in self._watches.values():
                watch.close()
        self._choice.close()

    # --- blobs ---

    def _blob(self, key: BlobKey) -> bytes:
        size = self._sizes.get(key.digest)
        # Without its size, which a commit record told, a mirror could send anything without end.
        for _ in range(ATTEMPTS if size is not None else 0):
            assert size is not None
            mirror = self._choice.first()
            if mirror is None:
                break
            try:
                data = mirror.blob(key, size)
            except MirrorProblem as problem:
                self._choice.failed(mirror, problem)
                if problem.rest_s is None:
                    break  # it does not have the blob: then the board may not either
                continue
            self._choice.worked(mirror)
            with self._lock:
                self.mirror_bytes += len(data)
            return data
        return self._ask_board(key.key)

    def _note_sizes(self, record: bytes) -> None:
        with self._lock:
            for digest, size in blob_sizes(record):
                self._sizes[digest] = size
                self._sizes.move_to_end(digest)
            while len(self._sizes) > MAX_SIZES:
                self._sizes.popitem(last=False)

    # --- manifests ---

    def _manifest(self, key: ManifestKey) -> bytes:
        held = self._held(key.key)
        if held is not None:
            return held
        watch = self._watch(key.run_id)
        if watch.absent(key):
            raise MissingKey(key.key, self.url)
        data = self._signed_from_mirror(key) if self._trust is not None else None
        seen_on_board = data is None
        if data is None:
            try:
                data = self._ask_board(key.key)
            except MissingKey:
                watch.missing(key)
                raise
        watch.present(key, seen_on_board=seen_on_board)
        self._note_sizes(data)
        return self._hold(key.key, data)

    def _signed_from_mirror(self, key: ManifestKey) -> bytes | None:
        mirror = self._choice.first()
        if mirror is None:
            return None
        try:
            data = mirror.manifest(key)
            if data is None:
                return None
            if not self._vouched(key, data):
                raise self._not_vouched(mirror, key)
        except MirrorProblem as problem:
            self._choice.failed(mirror, problem)
            return None
        self._choice.worked(mirror)
        return data

    def _not_vouched(self, mirror: Mirror, key: ManifestKey) -> MirrorProblem:
        return MirrorProblem(mirror.url, f"what it sent as {key.key} is not signed by a trusted key", WRONG_REST_S)

    def _vouched(self, key: ManifestKey, data: bytes) -> bool:
        """Whether a trusted key signed this as the manifest of this run and version."""
        if self._trust is None:
            return False
        try:
            record = json.loads(data)
            self._trust.check(record, key.key)
            return (record["run_id"], record["version"]) == (key.run_id, key.version)
        except (ValueError, KeyError, TypeError, SignatureProblem):
            return False

    def _watch(self, run_id: str) -> Watch:
        with self._lock:
            if run_id not in self._watches:
                self._watches[run_id] = Watch(self._choice, self._check_s, self._arrived)
            return self._watches[run_id]

    def _arrived(self, mirror: Mirror, key: ManifestKey, data: bytes) -> bool:
        """A mirror says that a version is there. Runs in the watching thread."""
        vouched = self._vouched(key, data)
        if self._trust is not None and not vouched:
            raise self._not_vouched(mirror, key)
        if vouched:
            self._note_sizes(data)
            self._hold(key.key, data)
            with self._lock:
                self.mirror_bytes += len(data)
        notify = self.notify
        if notify is not None:
            notify()
        return vouched

    # --- the board, and what it said a moment ago ---

    def _ask_board(self, key: str) -> bytes:
        with self._lock:
            self.board_reads += 1
        return self.board.get(key)

    def _held(self, key: str) -> bytes | None:
        with self._lock:
            held = self._recent.get(key)
            return held[1] if held is not None and time.monotonic() < held[0] else None

    def _hold(self, key: str, data: bytes) -> bytes:
        with self._lock:
            self._recent[key] = (time.monotonic() + self._check_s, data)
            self._recent.move_to_end(key)
            while len(self._recent) > MAX_RECENT:
                self._recent.popitem(last=False)
        return data

    def _forget(self, key: str) -> None:
        with self._lock:
            self._recent.pop(key, None)
