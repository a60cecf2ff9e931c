"""Islands on real sockets in this process, as a client meets them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from sprawl.board.records import IslandRecord
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.sidecar import build_app
from sprawl.rollout.wire import GenerateRequest, SamplingParams, VersionPolicy
from tests.rollout.support import Stack, TinyRun

FIVE_TOKENS = SamplingParams(n=2, max_new_tokens=5)


def record(island_id: str, url: str, **changes: Any) -> IslandRecord:
    facts: dict[str, Any] = {
        "island_id": island_id,
        "url": url,
        "state": "ready",
        "applied": 0,
        "started_at": 1.0,
        "heartbeat_at": time.time(),
        "interval_s": 2.0,
        **changes,
    }
    return IslandRecord(**facts)


def request(params: SamplingParams = FIVE_TOKENS, **policy: int) -> GenerateRequest:
    return GenerateRequest(input_ids=[5], sampling_params=params, weight_version=VersionPolicy(**policy))


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


class LiveIsland:
    """A sidecar with a fake engine on a real port."""

    def __init__(self, island_id: str, stack: Stack, token: str | None = None) -> None:
        stack.service.island_id = island_id
        self.stack, self.island_id = stack, island_id
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        app = build_app(stack.service, token=token)
        self.server = _Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1))

    def start(self) -> None:
        self.task = asyncio.ensure_future(self.server.serve(sockets=[self.listener]))

    def die(self) -> None:
        """Drop every connection without an answer and stop listening, as a killed process does."""
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()
        for server in self.server.servers:
            server.close()
        self.listener.close()

    async def stop(self) -> None:
        self.server.should_exit = True
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def live(*stacks: Stack, token: str | None = None) -> AsyncIterator[list[LiveIsland]]:
    async with contextlib.AsyncExitStack() as exits:
        islands = []
        for number, stack in enumerate(stacks):
            await exits.enter_async_context(stack)
            island = LiveIsland(f"island-{number}", stack, token)
            island.start()
            exits.push_async_callback(island.stop)
            islands.append(island)
        yield islands


def stacks(count: int, versions: int = 1, token_s: float = 0.0, **options: Any) -> list[Stack]:
    run = TinyRun().publish(versions)
    return [Stack(run, FakeEngine(token_s=token_s), **options) for _ in range(count)]
