"""Blobs on a mirror's disk: bounded in bytes, least recently used out first, never handed out unverified.

A file is named by the blake3 of its bytes. It is hashed before it is handed out for the first time in this process's
life, again whenever its size or times changed, and whenever a reader says that what it got was wrong.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from sprawl.errors import SprawlError

_TEMPORARY = ".tmp-"
_HASH_CHUNK = 4 << 20

Stamp = tuple[int, int, int]  # inode, nanoseconds of the last change, bytes


@dataclass
class _Entry:
    size: int
    verified: Stamp | None = None


class DiskCache:
    """Thread-safe. `limit` bounds the bytes of the files in `directory`; one that is being read while it is evicted
    keeps its space until the reader is done."""

    def __init__(self, directory: Path, limit: int) -> None:
        """Takes over what an earlier process left. Raises SprawlError: not writable, or in use by another mirror."""
        self.limit = limit
        self.evicted = 0
        self.damaged = 0
        self._directory = directory
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._reserved = 0  # bytes of files that are being written
        self._lock = threading.Lock()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._guard = (directory / ".lock").open("w")
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._adopt()
        except BlockingIOError:
            raise SprawlError(f"cache {directory} belongs to a running mirror", "choose another --cache") from None
        except OSError as error:
            raise SprawlError(f"cache {directory} cannot be used: {error.strerror}", "see --cache") from None

    @property
    def used(self) -> int:
        with self._lock:
            return sum(entry.size for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def open(self, digest: str, *, suspect: bool = False) -> tuple[BinaryIO, int] | None:
        """The open file and its size, None when the blob is not here (any more). `suspect`: hash it whatever is known
        of it. A file that does not have its digest is deleted."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return None
            self._entries.move_to_end(digest)
        try:
            file = self._path(digest).open("rb")
        except OSError:
            self._forget(digest)
            return None
        stamp = _stamp(file)
        if suspect or entry.verified != stamp:
            if _digest_of(file) != digest:
                file.close()
                self.damaged += 1
                self._forget(digest)
                return None
            entry.verified = stamp
        return file, stamp[2]

    def put(self, digest: str, data: bytes) -> None:
        """Keep a blob whose digest the caller has checked. Raises OSError; ValueError when it is beyond the limit."""
        if len(data) > self.limit:
            raise ValueError(f"{len(data)} bytes exceed the cache of {self.limit}")
        with self._lock:
            self._reserved += len(data)
            self._make_room()
        path = self._path(digest)
        temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                stamp = _stamp_after_flush(file)
            os.replace(temporary, path)  # no fsync: what a crash garbles does not have its digest
        except OSError:
            with self._lock:
                self._reserved -= len(data)
            temporary.unlink(missing_ok=True)
            raise
        with self._lock:
            self._reserved -= len(data)
            self._entries[digest] = _Entry(len(data), stamp)
            self._entries.move_to_end(digest)
            self._make_room()

    def close(self) -> None:
        """Let another mirror have the directory."""
        self._guard.close()

    def _adopt(self) -> None:
        found = []
        for path in self._directory.glob("[0-9a-f][0-9a-f]/*"):
            if path.name.startswith(_TEMPORARY):
                path.unlink(missing_ok=True)
            elif len(path.name) == 64:
                status = path.stat()
                found.append((status.st_mtime_ns, path.name, status.st_size))
        for _, digest, size in sorted(found):
            self._entries[digest] = _Entry(size)
        with self._lock:
            self._make_room()

    def _make_room(self) -> None:
        """Evict until what is here and what is coming fits. The lock is held."""
        total = sum(entry.size for entry in self._entries.values()) + self._reserved
        while total > self.limit and self._entries:
            digest, entry = self._entries.popitem(last=False)
            self._path(digest).unlink(missing_ok=True)
            total -= entry.size
            self.evicted += 1

    def _forget(self, digest: str) -> None:
        with self._lock:
            self._entries.pop(digest, None)
            with contextlib.suppress(OSError):
                self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: str) -> Path:
        return self._directory / digest[:2] / digest


def _stamp(file: BinaryIO) -> Stamp:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_mtime_ns, status.st_size


def _stamp_after_flush(file: BinaryIO) -> Stamp:
    file.flush()
    return _stamp(file)


def _digest_of(file: BinaryIO) -> str:
    hasher = blake3()
    while chunk := file.read(_HASH_CHUNK):
        hasher.update(chunk)
    file.seek(0)
    return hasher.hexdigest()
