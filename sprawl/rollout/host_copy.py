"""Where an island keeps the state it serves: in memory, or on disk for engines that read their weights from files."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from sprawl.errors import IntegrityError, SprawlError

if TYPE_CHECKING:
    from sprawl.board.local_copy import LocalCopy
    from sprawl.board.reader import Prepared, Served, VersionReader

log = logging.getLogger(__name__)


class HostCopy(Protocol):
    """Holds one state. Blocking; called by one caller at a time."""

    def open(self) -> Served | None:
        """What a former life of the island left, verified; None when there is nothing of use."""

    def replace(self, served: Served) -> Served:
        """Hold this state instead."""

    def step(self, reader: VersionReader, prepared: Prepared) -> Served:
        """Take the held state to `prepared.version`. Raises IntegrityError as `VersionReader.commit`, SprawlError."""


class MemoryCopy:
    """The state in memory. Nothing outlives the process."""

    def __init__(self) -> None:
        self._served: Served | None = None

    def open(self) -> Served | None:
        return None

    def replace(self, served: Served) -> Served:
        self._served = served
        return served

    def step(self, reader: VersionReader, prepared: Prepared) -> Served:
        assert self._served is not None
        reader.commit(self._served, prepared)
        return self._served


class DiskCopy:
    """A Hugging Face checkpoint in `directory`, patched in place under a journal; see `sprawl.board.local_copy`.
    `files` are the checkpoint's others: config.json ... The directory is locked against other processes for the life
    of this one."""

    def __init__(self, directory: Path, run_id: str, files: Mapping[str, bytes]) -> None:
        """Raises SprawlError when another process has the directory, or it cannot be written."""
        self.directory = directory
        self._lock = _locked(directory)
        self._run_id = run_id
        self._files = files
        self._copy: LocalCopy | None = None

    def open(self) -> Served | None:
        from sprawl.board.local_copy import LocalCopy

        try:
            copy = LocalCopy.open(self.directory)
        except IntegrityError as error:
            log.warning("%s: it is fetched again", error.message)
            return None
        if copy is None or copy.run_id != self._run_id:
            return None
        self._copy = copy
        self._write_files()
        return copy.served

    def replace(self, served: Served) -> Served:
        from sprawl.board.local_copy import LocalCopy

        self._copy = LocalCopy.create(self.directory, self._run_id, served)
        self._write_files()
        return self._copy.served

    def step(self, reader: VersionReader, prepared: Prepared) -> Served:
        assert self._copy is not None
        self._copy.step(reader, prepared)
        return self._copy.served

    def close(self) -> None:
        """Give the directory to whoever wants it next."""
        self._lock.close()

    def _write_files(self) -> None:
        try:
            for name, data in self._files.items():
                (self.directory / name).write_bytes(data)
        except OSError as error:
            raise SprawlError(f"cannot write {self.directory}: {error.strerror or error}") from None


def _locked(directory: Path) -> IO[str]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / ".lock").open("w")
    except OSError as error:
        raise SprawlError(f"cannot write {directory}: {error.strerror or error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SprawlError(f"{directory} is used by another island", "choose another with --work-dir") from None
    return file
