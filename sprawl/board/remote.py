"""A board in object storage, through fsspec (`s3://`, `gs://`, `az://` ...).

Always whole-object operations: an exception inside `open("wb")` commits a partial file. Listings are never cached:
with a cached listing s3fs returned truncated objects. Processes must be spawned, not forked, after a store was used.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sprawl.board.store import Keys, MissingKey
from sprawl.errors import BoardError

T = TypeVar("T")

_EXTRAS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_CONFLICTS = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
_TRANSIENT = {"500", "502", "503", "504"}
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
# A dead endpoint must show up in seconds, not after botocore's minutes of default retries.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": 3,
            "read_timeout": 60,
            "retries": {"max_attempts": 2, "mode": "standard"},
        },
    },
}


class RemoteStore:
    """`url` is `scheme://bucket/prefix`. Credentials and endpoint come from the environment (AWS_ENDPOINT_URL ...)."""

    def __init__(self, filesystem: Any, root: str, url: str) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self.url = url

    @classmethod
    def open(cls, url: str) -> RemoteStore:
        """Connect, and make one cheap request. Raises BoardError when the bucket is missing or unreachable."""
        import fsspec

        scheme = url.partition("://")[0]
        try:
            # No instance cache: a store opened after credentials or endpoint changed must not get the old client.
            options = {"use_listings_cache": False, "skip_instance_cache": True, **_OPTIONS.get(scheme, {})}
            filesystem, root = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            package = _EXTRAS.get(scheme, f"the fsspec backend of {scheme}://")
            raise BoardError(f"board {url} needs {package}: {error}", f"pip install {package}") from None
        except ValueError as error:
            raise BoardError(
                f"board {url} cannot be opened: {error}", "give a directory or a URL like s3://bucket/runs"
            ) from None
        store = cls(filesystem, root, url)
        with contextlib.suppress(MissingKey):
            store.get(".reachable")
        return store

    def get(self, key: str) -> bytes:
        return self._call("read", key, lambda: self._filesystem.cat_file(self._path(key)))

    def put(self, key: str, data: bytes) -> None:
        self._call("write", key, lambda: self._filesystem.pipe_file(self._path(key), data))

    def create(self, key: str, data: bytes) -> bool:
        try:
            _patiently(lambda: self._filesystem.pipe_file(self._path(key), data, mode="create"))
        except Exception as error:
            if not _is_conflict(error):
                raise self._failure("create", key, error) from None
            # A put of ours whose reply was lost may have been tried again: what is there decides.
            return self.get(key) == data
        return True

    def exists(self, key: str) -> bool:
        # Not fsspec's own exists/isfile: they answer False when the network fails.
        info = self._call("look for", key, lambda: self._filesystem.info(self._path(key)), missing={"type": "missing"})
        return info["type"] == "file"

    def list(self, prefix: str) -> Keys:
        folder, _, _ = prefix.rpartition("/")
        found: Keys = self._call("list", prefix, lambda: self._filesystem.find(self._path(folder)), missing=[])
        keys = (self._key(path) for path in found)
        return sorted(key for key in keys if key and key.startswith(prefix))

    def children(self, prefix: str) -> Keys:
        path = self._path(prefix.rstrip("/"))
        found: Keys = self._call("list", prefix, lambda: self._filesystem.ls(path, detail=False), missing=[])
        names = (self._key(item.rstrip("/"))[len(prefix) :] for item in found)
        return sorted(name for name in names if name and not name.startswith("."))

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self._filesystem.rm_file(self._path(key)), missing=None)

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """Whole-object puts leave nothing behind (unfinished multipart uploads are the bucket's lifecycle rule)."""
        return 0

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _key(self, path: str) -> str:
        return path.lstrip("/").removeprefix(self._root.lstrip("/")).lstrip("/")

    def _call(self, action: str, key: str, call: Callable[[], T], **default: T) -> T:
        # Backends raise their SDK's own exception types, so the net has to be this wide.
        try:
            return _patiently(call)
        except FileNotFoundError as error:
            if "NoSuchBucket" in _codes(error):
                raise BoardError(f"board {self.url}: the bucket does not exist", "create the bucket first") from None
            if "missing" in default:
                return default["missing"]
            raise MissingKey(key, self.url) from None
        except Exception as error:
            raise self._failure(action, key, error) from None

    def _failure(self, action: str, key: str, error: Exception) -> BoardError:
        endpoint = getattr(self._filesystem, "endpoint_url", None)
        where = f" (endpoint {endpoint})" if endpoint else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        fix = "check the credentials" if isinstance(error, PermissionError) else "check the URL and the network"
        return BoardError(f"board {self.url}{where}: cannot {action} {key}: {type(error).__name__}: {reason}", fix)


def _patiently(call: Callable[[], T]) -> T:
    """`call`, tried again where the store answered that it cannot just now. Every operation of a store may be repeated.

    The SDK tries again only for a second or so, because a dead endpoint has to show up soon; one that answers is there.
    """
    for pause_s in _PAUSES_S:
        try:
            return call()
        except Exception as error:
            if not _codes(error) & _TRANSIENT:
                raise
            time.sleep(pause_s)
    return call()


def _codes(error: BaseException | None) -> set[str]:
    """Error codes of the SDK exceptions behind `error`."""
    codes: set[str] = set()
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            codes.add(str(response.get("Error", {}).get("Code")))
            codes.add(str(response.get("ResponseMetadata", {}).get("HTTPStatusCode")))
        error = error.__cause__ or error.__context__
    return codes


def _is_conflict(error: Exception) -> bool:
    if isinstance(error, FileExistsError):
        return True
    return (
        isinstance(error, OSError)
        and error.errno in (errno.EINVAL, errno.EEXIST, None)
        and bool(_codes(error) & _CONFLICTS)
    )
