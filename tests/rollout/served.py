"""A sidecar on a real socket, in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sprawl.rollout.server import Limits, Server
from sprawl.rollout.sidecar import build_app
from tests.rollout.support import Stack, until


@asynccontextmanager
async def serving(stack: Stack, limits: Limits | None = None, token: str | None = None) -> AsyncIterator[str]:
    """The base URL of a server for `stack`."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        server = Server(build_app(stack.service, token=token), stack.service.connections, limits=limits)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
