"""A directory that one process at a time may change. The lock ends with the process that holds it, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sprawl.errors import SprawlError, file_failure


@contextmanager
def hold(directory: str | Path) -> Iterator[None]:
    """Hold `directory`, which is made when it is not there.

    Raises SprawlError when another process (or somebody else in this one) holds it, when it cannot be made, or when
    its file system has no locks.
    """
    descriptor = _open(Path(directory))
    try:
        try:
            # On the directory itself: a lock file would be one more thing beside the checkpoint.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise SprawlError(
                    f"{directory} is in use by another process", "give every island a directory of its own"
                ) from None
            raise SprawlError(
                f"cannot lock {directory}: {error.strerror}", "choose a directory on a disk of this machine"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _open(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise file_failure("write", directory, error) from None
