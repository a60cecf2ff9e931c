"""Where a process can die: before every operation that changes the disk or the object store, and inside long ones.

`arm(n)` makes this process kill itself (SIGKILL, nothing is cleaned up) at its n-th such point.
"""

import io
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import sprawl.delta.kernels as kernels
from sprawl.board.remote import RemoteStore

_CALLS = ("fsync", "link", "replace", "unlink", "rmdir", "mkdir")


class _Points:
    def __init__(self, deadly: int) -> None:
        self.deadly = deadly
        self.passed = 0

    def reached(self) -> bool:
        self.passed += 1
        return self.passed > self.deadly

    def die_here(self) -> None:
        if self.reached():
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def arm(deadly: int) -> None:
    """Only in a process that is there to be killed."""
    points = _Points(deadly)
    for name in _CALLS:
        setattr(os, name, _before(points, getattr(os, name)))
    os.fdopen = _halved(points, os.fdopen)  # type: ignore[assignment]
    pathlib.Path.open = _halved_open(points, pathlib.Path.open)  # type: ignore[assignment, method-assign]
    pathlib.Path.write_bytes = _halved_bytes(points)  # type: ignore[assignment, method-assign]
    kernels.scatter = _halved_scatter(points, kernels.scatter)
    opened = RemoteStore.open.__func__  # type: ignore[attr-defined]

    def open_armed(cls: type[RemoteStore], url: str) -> RemoteStore:
        store = opened(cls, url)
        filesystem = store._filesystem
        filesystem.pipe_file = _around(points, filesystem.pipe_file)
        filesystem.rm_file = _around(points, filesystem.rm_file)
        return store

    RemoteStore.open = classmethod(open_armed)  # type: ignore[assignment, method-assign, arg-type]


def _before(points: _Points, call: Callable[..., Any]) -> Callable[..., Any]:
    def armed(*arguments: Any, **options: Any) -> Any:
        points.die_here()
        return call(*arguments, **options)

    return armed


def _around(points: _Points, call: Callable[..., Any]) -> Callable[..., Any]:
    """Before a request, while it is on its way, and when its reply is lost."""

    def armed(*arguments: Any, **options: Any) -> Any:
        points.die_here()
        for delay in (0.0005, 0.002):
            if points.reached():
                threading.Timer(delay, die).start()
        result = call(*arguments, **options)
        points.die_here()
        return result

    return armed


class _Halved:
    """A file whose first write stops in the middle."""

    def __init__(self, points: _Points, file: Any) -> None:
        self._points = points
        self._file = file

    def write(self, data: Any) -> int:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._points.die_here()
        return half + self._file.write(data[half:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_Halved":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _halved(points: _Points, call: Callable[..., Any]) -> Callable[..., Any]:
    def armed(descriptor: int, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = call(descriptor, mode, *arguments, **options)
        return _Halved(points, file) if mode == "wb" else file

    return armed


def _halved_open(points: _Points, call: Callable[..., Any]) -> Callable[..., Any]:
    def armed(path: pathlib.Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = call(path, mode, *arguments, **options)
        return _Halved(points, file) if mode == "wb" else file

    return armed


def _halved_bytes(points: _Points) -> Callable[..., int]:
    def armed(path: pathlib.Path, data: bytes) -> int:
        with _Halved(points, io.open(path, "wb")) as file:  # noqa: UP020 - Path.open is armed
            return file.write(data)

    return armed


def _halved_scatter(points: _Points, call: Callable[..., None]) -> Callable[..., None]:
    def armed(target: np.ndarray, indices: np.ndarray, values: np.ndarray) -> None:
        points.die_here()
        half = indices.size // 2
        call(target, indices[:half], values[:half])
        points.die_here()
        call(target, indices[half:], values[half:])

    return armed
