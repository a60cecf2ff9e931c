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
async def serving(
    stack: Stack, limits: Limits | None = None, certificate: tuple[str | None, str | None] = (None, None)
) -> AsyncIterator[str]:
    """The base URL of a server for `stack`; https with a certificate and its key."""
    cert, key = certificate
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        app = build_app(stack.service)
        server = Server(app, stack.service.connections, limits=limits, tls_cert=cert, tls_key=key)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            await until(lambda: server.started)
            yield f"{'https' if cert else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
