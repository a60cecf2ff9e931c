"""A board in a local directory (or a network file system with hard links and atomic rename)."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from sprawl.board.store import Keys, MissingKey
from sprawl.errors import BoardError, fix_of

_TEMPORARY = ".tmp-"

Buffer: TypeAlias = bytes | memoryview


def sync_directory(path: Path) -> None:
    """Make renames, links and deletions in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, *chunks: Buffer) -> None:
    """Write beside the target, sync, rename, sync: the file is the old one or the new one, whatever happens."""
    write_beside(path, chunks)
    exchange(path)


def beside(path: Path) -> Path:
    """Where `write_beside` writes."""
    return path.with_name(f"{_TEMPORARY}{path.name}")


def write_beside(path: Path, chunks: Iterable[Buffer]) -> None:
    """The first half of `replace_durably`: everything that takes room on the disk. `path` is not touched."""
    with beside(path).open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def exchange(path: Path) -> None:
    """The second half: what was written beside `path` takes its place."""
    os.replace(beside(path), path)
    sync_directory(path.parent)


class LocalStore:
    """Objects are files. Writers fill a temporary file beside the target, sync it, then rename (or hard-link) it."""

    def __init__(self, root: Path, url: str | None = None) -> None:
        self.root = root.absolute()
        self.url = url or str(root)
        with self._failures("create", ""):
            self._make_directory(self.root)

    def get(self, key: str) -> bytes:
        try:
            with self._failures("read", key):
                return self._path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise MissingKey(key, self.url) from None

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._failures("write", key), self._temporary(path, data) as temporary:
            os.replace(temporary, path)
            sync_directory(path.parent)

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with self._failures("create", key), self._temporary(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return path.read_bytes() == data
            except OSError as error:
                if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise BoardError(
                        f"the file system of board {self.url} has no hard links, which exclusive create needs",
                        "put the board on a local disk, NFS or object storage",
                    ) from None
                raise
            sync_directory(path.parent)
        return True

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def list(self, prefix: str) -> Keys:
        folder, _, _ = prefix.rpartition("/")
        keys = (path.relative_to(self.root).as_posix() for path in self._files(self._path(folder)))
        return sorted(key for key in keys if key.startswith(prefix) and not _is_temporary(key))

    def children(self, prefix: str) -> Keys:
        try:
            with self._failures("list", prefix):
                names = os.listdir(self._path(prefix.rstrip("/")))
                return sorted(name for name in names if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._failures("delete", key):
            path.unlink(missing_ok=True)
            # Empty folders of deleted versions would pile up; one that is in use simply stays.
            with contextlib.suppress(OSError):
                if path.parent != self.root:
                    path.parent.rmdir()

    def sweep(self, prefix: str, older_than_s: float) -> int:
        deadline = time.time() - older_than_s
        removed = 0
        for path in self._files(self._path(prefix.rstrip("/"))):
            with contextlib.suppress(FileNotFoundError):
                if _is_temporary(path.name) and path.stat().st_mtime < deadline:
                    path.unlink()
                    removed += 1
        return removed

    def _path(self, key: str) -> Path:
        parts = key.split("/") if key else []
        if any(part in ("", ".", "..") for part in parts) or "\0" in key:
            raise BoardError(f"{key!r} is not a valid board key", "names on a board have no `/`, `.` or `..` as a part")
        return self.root.joinpath(*parts)

    def _files(self, folder: Path) -> Iterator[Path]:
        for directory, _, names in os.walk(folder):
            for name in names:
                yield Path(directory, name)

    @contextlib.contextmanager
    def _temporary(self, path: Path, data: bytes) -> Iterator[Path]:
        temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}")
        descriptor = self._open_new(temporary)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _open_new(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        # A concurrent delete may remove the folder between making and using it.
        for _ in range(10):
            try:
                return os.open(path, flags, 0o644)
            except FileNotFoundError:
                self._make_directory(path.parent)
        return os.open(path, flags, 0o644)

    def _make_directory(self, path: Path) -> None:
        missing = [parent for parent in (path, *path.parents) if not parent.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for made in missing:
            with contextlib.suppress(FileNotFoundError):
                sync_directory(made.parent)

    @contextlib.contextmanager
    def _failures(self, action: str, key: str) -> Iterator[None]:
        """Turn file-system trouble (permissions, full disk) into BoardError; a missing file passes through."""
        try:
            yield
        except (FileNotFoundError, IsADirectoryError):
            raise
        except NotADirectoryError as error:
            if action in ("read", "list"):
                raise
            raise self._trouble(action, key, error) from None
        except OSError as error:
            raise self._trouble(action, key, error) from None

    def _trouble(self, action: str, key: str, error: OSError) -> BoardError:
        what = f"board {self.url}: cannot {action} {key or 'the directory'}: {error.strerror}"
        return BoardError(what, fix_of(error))


def _is_temporary(key: str) -> bool:
    return key.rpartition("/")[2].startswith(_TEMPORARY)
