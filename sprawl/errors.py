"""Errors a user can act on.

`SprawlError` is raised for bad input and for a world that is not as it has to be (a missing board, a taken port).
The command line prints it as one line and exits with its code (2); nothing else in the project catches it silently.
"""

from __future__ import annotations

import errno


class SprawlError(Exception):
    """A problem that the reader can fix: says what is wrong and, where there is one, the fix."""

    exit_code = 2

    def __init__(self, message: str, fix: str | None = None) -> None:
        self.message = message
        self.fix = fix
        super().__init__(f"{message} ({fix})" if fix else message)


class ConfigError(SprawlError):
    """A run YAML that cannot be used; the message names the field."""


class BoardError(SprawlError):
    """The board is missing, unreachable or unfit (no exclusive create)."""


class IntegrityError(SprawlError):
    """Bytes that are not what a digest promised. Never retried into a partial state."""


class FencedError(SprawlError):
    """Another writer with a newer epoch took over this run."""


class OvertakenError(SprawlError):
    """A predecessor that was taken for dead committed this step at the last moment. Resuming goes on from there."""


class Diverged(SprawlError):
    """The run stopped on purpose: non-finite gradients or a drifting mismatch."""


class Verdict(Diverged):
    """The drift controller gave the run up: the message says what was seen, the fix what to try in the next one.

    Resuming ends in the same verdict, because decisions follow from what is on the board.
    """

    exit_code = 3


def file_failure(doing: str, place: object, error: OSError) -> SprawlError:
    """`cannot <doing> <place>: <why> (<fix>)` for what the operating system refused. `doing`: "read", "write" ..."""
    return SprawlError(f"cannot {doing} {place}: {error.strerror or error}", fix_of(error))


def fix_of(error: OSError) -> str:
    """What to do about something that the operating system refused."""
    return _FIXES.get(error.errno or 0, "choose another place")


_FIXES = {
    errno.ENOENT: "check the path: it, or a directory of it, is missing",
    errno.ENOTDIR: "a file stands where a directory is needed: choose another place",
    errno.EEXIST: "a file stands where a directory is needed: choose another place",
    errno.EISDIR: "it is a directory: name a file",
    errno.EACCES: "check the permissions, or choose another place",
    errno.EPERM: "check the permissions, or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.ENOSPC: "free some room there",
    errno.EDQUOT: "free some room there",
}
