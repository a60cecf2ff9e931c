"""The one fake engine: no model, tokens that name the version that made them, every call recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from sprawl.rollout.engine import EngineError, EngineLimits, Trouble, Watch
from sprawl.rollout.rows import Row
from sprawl.rollout.wire import Sample, SamplingParams

if TYPE_CHECKING:
    from sprawl.board.reader import Served


class FakeEngine:
    """See `sprawl.rollout.engine.Engine`. Version v generates the token v, every `token_s` seconds, in all rows.

    `calls` holds the name of every port call in order, with the version for load and swap. A swap to a version in
    `refuses` fails and changes nothing.
    """

    def __init__(self, *, token_s: float = 0.0, vocab_size: int = 1000, max_length: int = 4096) -> None:
        self.limits = EngineLimits(vocab_size, max_length, 1 << 20)
        self.calls: list[tuple[Any, ...]] = []
        self.refuses: set[int] = set()
        self.failing: Trouble | None = None
        self.cancelled = 0
        self.active = 0
        self.version: int | None = None
        self._token_s = token_s
        self._running = asyncio.Event()
        self._running.set()
        self._closed = False

    async def load(self, served: Served) -> None:
        self.calls.append(("load", served.version))
        self.version = served.version
        self._running.set()

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, watch: Watch | None = None
    ) -> list[Sample]:
        self.calls.append(("generate", tuple(input_ids)))
        rows = [Row() for _ in range(params.n)]
        self.active += 1
        try:
            while any(row.finished is None for row in rows):
                await asyncio.sleep(self._token_s)
                await self._running.wait()
                if self._closed or self.version is None:
                    raise EngineError("the engine is closed" if self._closed else "the engine has no weights yet")
                for index, row in enumerate(rows):
                    if row.finished is None:
                        row.push(self.version, 0.0, self.version, params.stop_token_ids, params.max_new_tokens)
                        if watch is not None and watch(index, self.version, 0.0):
                            row.finished = "stop"
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1
        return [row.sample() for row in rows]

    @property
    def watched_version(self) -> int | None:
        return self.version

    async def pause(self) -> None:
        self.calls.append(("pause",))
        self._running.clear()

    async def swap(self, served: Served, changed: AbstractSet[str]) -> None:
        if self._running.is_set():
            raise RuntimeError("swap without pause")
        self.calls.append(("swap", served.version, frozenset(changed)))
        await asyncio.sleep(self._token_s)
        if served.version in self.refuses:
            raise EngineError(f"version {served.version} was refused")
        self.version = served.version

    async def resume(self) -> None:
        self.calls.append(("resume",))
        self._running.set()

    def trouble(self) -> Trouble | None:
        return self.failing

    def info(self) -> dict[str, Any]:
        return {"kind": "fake", "version": self.version}

    async def close(self) -> None:
        self.calls.append(("close",))
        self._closed = True
        self._running.set()
