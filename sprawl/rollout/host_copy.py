"""Where an island keeps the state it serves: in memory, or on disk, for engines that read their weights from files and
for islands that are to find them again.

A change is staged (everything that takes time or room, and the check that it gives the published state; nothing is
touched), committed while nothing is admitted, and settled afterwards.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sprawl.errors import IntegrityError, SprawlError, file_failure

if TYPE_CHECKING:
    from sprawl.board.local_copy import LocalCopy, Staged
    from sprawl.board.reader import Prepared, Served, VersionReader

log = logging.getLogger(__name__)


class HostCopy(Protocol):
    """Holds one state. Blocking; called by one caller at a time."""

    def open(self) -> Served | None:
        """What a former life of the island left, verified; None when there is nothing of use. Raises SprawlError."""

    def check_room(self, size: int) -> None:
        """Before `size` bytes of a whole state are fetched. Raises SprawlError when they would not fit."""

    def stage(self, reader: VersionReader, prepared: Prepared) -> None:
        """Get ready to take the held state to `prepared.version`.

        Raises IntegrityError when that is not the published state, SprawlError when the disk is full or fails."""

    def stage_whole(self, served: Served) -> None:
        """Get ready to hold `served` instead. Raises SprawlError when the disk is full or fails."""

    def commit(self, reader: VersionReader) -> Served:
        """What was staged last becomes the held state. Raises IntegrityError as `VersionReader.commit`, SprawlError:
        what is held is not known then."""

    def settle(self) -> None:
        """Make the last commit durable. Raises SprawlError; call it again then."""

    def close(self) -> None:
        """Give up what is locked. What is held stays readable."""


class MemoryCopy:
    """The state in memory. Nothing outlives the process."""

    def __init__(self) -> None:
        self._served: Served | None = None
        self._staged: Prepared | Served | None = None

    def open(self) -> Served | None:
        return None

    def check_room(self, size: int) -> None:
        """Memory is not measured ahead."""

    def stage(self, reader: VersionReader, prepared: Prepared) -> None:
        assert self._served is not None
        reader.check(self._served, prepared)
        self._staged = prepared

    def stage_whole(self, served: Served) -> None:
        self._staged = served

    def commit(self, reader: VersionReader) -> Served:
        from sprawl.board.reader import Served

        staged, self._staged = self._staged, None
        assert staged is not None
        if isinstance(staged, Served):
            self._served = staged
        else:
            assert self._served is not None
            reader.commit(self._served, staged)
        return self._served

    def settle(self) -> None:
        """Memory has nothing to settle."""

    def close(self) -> None:
        """Memory is not locked."""


class DiskCopy:
    """A Hugging Face checkpoint in `directory`, patched in place under a journal; see `sprawl.board.local_copy`.
    `files` are the checkpoint's others: config.json ... The directory is locked against other processes."""

    def __init__(self, directory: Path, run_id: str, files: Mapping[str, bytes]) -> None:
        """Raises SprawlError when another process has the directory, or it cannot be written."""
        from sprawl.board.directory_lock import hold

        self.directory = directory
        self._lock = ExitStack()
        self._lock.enter_context(hold(directory))
        self._run_id = run_id
        self._files = files
        self._copy: LocalCopy | None = None
        self._staged: Staged | None = None

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

    def check_room(self, size: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < size:
            raise SprawlError(
                f"{self.directory} has room for {free:,} bytes, a checkpoint of this run takes {size:,}",
                "free some room, or choose a larger disk",
            )

    def stage(self, reader: VersionReader, prepared: Prepared) -> None:
        assert self._copy is not None
        self._staged = self._copy.stage(reader, prepared)

    def stage_whole(self, served: Served) -> None:
        from sprawl.board.local_copy import stage_whole

        if self._copy is not None:
            self._copy.settle()
        self._staged = stage_whole(self.directory, self._run_id, served)

    def commit(self, reader: VersionReader) -> Served:
        from sprawl.board.local_copy import LocalCopy

        staged, self._staged = self._staged, None
        assert staged is not None
        if self._copy is not None and self._copy.run_id == self._run_id:
            self._copy.commit(reader, staged)
        else:
            self._copy = LocalCopy.exchange(self.directory, staged)
            self._write_files()
        return self._copy.served

    def settle(self) -> None:
        if self._copy is not None:
            self._copy.settle()

    def close(self) -> None:
        self._lock.close()

    def _write_files(self) -> None:
        from sprawl.board.local import replace_durably

        try:
            for name, data in self._files.items():
                path = self.directory / name
                if not path.exists() or path.read_bytes() != data:
                    replace_durably(path, data)
        except OSError as error:
            raise file_failure("write", self.directory, error) from None
