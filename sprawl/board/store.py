"""Stores: the few object operations a board needs, with the guarantees the commit protocol stands on.

`put` is atomic and durable, `create` is exclusive, reads never see a partial object. Backends: a local directory
(`sprawl.board.local`), object storage through fsspec (`sprawl.board.remote`), and memory for tests.
"""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import Protocol

from sprawl.errors import BoardError

Keys = list[str]  # inside the classes below `list` is a method

NO_STORE_FIX = "check the path, or create it by starting a run with this --board"


class MissingKey(BoardError, KeyError):
    """No object under this key."""

    def __init__(self, key: str, url: str) -> None:
        super().__init__(f"no object {key} on board {url}")
        self.key = key

    def __str__(self) -> str:  # KeyError would print the repr
        return self.message


class Store(Protocol):
    """Keys are `/`-separated, relative to the store's root. Every method raises BoardError when the store fails."""

    @property
    def url(self) -> str:
        """What a person would type to open this store again."""

    def get(self, key: str) -> bytes:
        """The whole object. Raises MissingKey."""

    def put(self, key: str, data: bytes) -> None:
        """Write or overwrite, atomically and durably."""

    def create(self, key: str, data: bytes) -> bool:
        """Write only if there is no such object. True: `data` is what the key holds now, also when a lost reply hid
        that we won (so equal bytes count as ours: put a nonce in when two writers could be equal)."""

    def exists(self, key: str) -> bool: ...

    def list(self, prefix: str) -> Keys:
        """Sorted keys that start with `prefix`, recursive."""

    def children(self, prefix: str) -> Keys:
        """Sorted names directly under the folder `prefix` ("" or ending in "/"), without descending further.
        Names that start with a dot are internal and left out."""

    def delete(self, key: str) -> None:
        """Delete; a missing key is fine."""

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """Remove what interrupted writes left behind under `prefix`; returns how many."""


class MemoryStore:
    """A store in this process: for tests and experiments. `memory://name` opens the same one everywhere."""

    _shared: dict[str, MemoryStore] = {}  # noqa: RUF012 - shared on purpose
    _shared_lock = threading.Lock()

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        with cls._shared_lock:
            return cls._shared.setdefault(name, cls(name))

    def get(self, key: str) -> bytes:
        try:
            return self._objects[key]
        except KeyError:
            raise MissingKey(key, self.url) from None

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[key] = bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            return self._objects.setdefault(key, bytes(data)) == data

    def exists(self, key: str) -> bool:
        return key in self._objects

    def list(self, prefix: str) -> Keys:
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def children(self, prefix: str) -> Keys:
        names = {key[len(prefix) :].split("/", 1)[0] for key in self.list(prefix)}
        return sorted(name for name in names if not name.startswith("."))

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)

    def sweep(self, prefix: str, older_than_s: float) -> int:
        return 0


def probe_exclusive_create(store: Store) -> None:
    """Refuse a backend on which two writers could both commit. Raises BoardError."""
    key = f".probe/{secrets.token_hex(8)}"
    try:
        first, second = store.create(key, b"first"), store.create(key, b"second")
        held = store.get(key)
    finally:
        store.delete(key)
    if not first or second or held != b"first":
        raise BoardError(
            f"board {store.url} lets a second writer overwrite an exclusively created object",
            "use a backend with conditional writes (If-None-Match), such as S3, GCS, SeaweedFS or a local directory",
        )


def open_store(url: str, *, create: bool = False, probe: bool = False) -> Store:
    """Open a board: a directory (`runs`, `/data/runs`, `file:///data/runs`), `memory://name`, or any fsspec URL.

    `create` makes a missing directory; `probe` also checks that exclusive create works. Raises BoardError when the
    board is missing, unreachable, not readable, or fails the probe.
    """
    if not url:
        raise BoardError("the board URL is empty", "give a directory or an object-store URL")
    scheme, separator, rest = url.partition("://")
    store: Store
    if not separator or scheme in ("file", "local"):
        from sprawl.board.local import LocalStore

        path = Path(rest if separator else url).expanduser()
        if path.exists() and not path.is_dir():
            raise BoardError(f"board {url} is a file, not a directory", NO_STORE_FIX)
        if not path.exists() and not create:
            raise BoardError(f"no board at {url}: the directory does not exist", NO_STORE_FIX)
        store = LocalStore(path, url)
    elif scheme == "memory":
        store = MemoryStore.named(rest)
    else:
        from sprawl.board.remote import RemoteStore

        user, at, place = rest.partition("/")[0].rpartition("@")
        if at and ":" in user:
            # The address is shown wherever the run is: parameters, logs, the run's record.
            raise BoardError(
                f"the address of board {scheme}://...@{place} carries a password",
                "give credentials in the environment, for S3 as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        store = RemoteStore.open(url)
    if probe:
        probe_exclusive_create(store)
    return store
