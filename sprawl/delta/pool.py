"""Work on several threads, in order and never far ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Pool:
    """`threads` workers; with one, everything runs in the caller's thread. Close it by leaving its `with` block."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, "sprawl-delta") if threads > 1 else None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """`map`, at most two items a thread ahead of what was taken, so that memory stays bounded."""
        if self._executor is None:
            yield from map(function, items)
            return
        ahead: deque[Future[Result]] = deque()
        for item in items:
            ahead.append(self._executor.submit(function, item))
            if len(ahead) >= 2 * self._threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
