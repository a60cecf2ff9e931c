"""uvicorn with what it lacks for a port that strangers can reach: every phase of a connection has an end.

A client that dawdles over its headers or its body, or that does not read its answer, is dropped; connections above the
limit are answered 503 at once. The limits of a request (body size, how many are held) are the application's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from sprawl.rollout.counters import Connections

log = logging.getLogger(__name__)

SPARE_FILES = 128  # file descriptors kept for the board, the engine and the log
KEEP_ALIVE_S = 30  # longer than clients keep theirs, so that it is they who close
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True)
class Limits:
    """Seconds for each phase of a connection, and how many there may be."""

    connections: int = 2048
    handshake_s: float = 10.0
    headers_s: float = 10.0
    body_s: float = 30.0
    linger_s: float = 2.0  # for the rest of a body whose request was answered already
    write_s: float = 60.0  # during which the client takes nothing of its answer


Phase = Literal["headers", "body", "linger"]


class GuardedProtocol(H11Protocol):
    """One connection with deadlines. A deadline begins with its phase and is not moved by the bytes that trickle in."""

    def __init__(self, limits: Limits, counts: Connections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._limits, self._counts = limits, counts
        self._phase: Phase | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._counts.open += 1
        if self._counts.open > self._limits.connections:
            self._counts.refused += 1
            transport.write(FULL)
            transport.close()
            return
        self._enter_phase()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._enter_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._enter_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.open -= 1
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self._limits.write_s, self._drop)

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def _enter_phase(self) -> None:
        phase = None if self.transport.is_closing() else self._expected()
        if phase == self._phase:
            return
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._phase = phase
        seconds = {"headers": self._limits.headers_s, "body": self._limits.body_s, "linger": self._limits.linger_s}
        if phase is not None:
            self._reading = self.loop.call_later(seconds[phase], self._too_slow)

    def _expected(self) -> Phase | None:
        """What the client owes. An idle connection between two requests is uvicorn's, which closes it in time."""
        if self.conn.their_state is h11.SEND_BODY:
            return "linger" if self.conn.our_state is h11.DONE else "body"
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            return "headers"
        return None

    def _too_slow(self) -> None:
        if self._phase == "headers" and not self.transport.is_closing():
            self.transport.write(TOO_SLOW)
            self.transport.close()
            self._counts.dropped += 1
        else:
            self._drop()

    def _drop(self) -> None:
        self._counts.dropped += 1
        self.transport.abort()


class Server(uvicorn.Server):
    """Serves `app` on sockets that listen already. No signal handlers: draining comes before closing."""

    def __init__(
        self,
        app: ASGIApp,
        counts: Connections,
        *,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=H11Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=5,
                h11_max_incomplete_event_size=32 << 10,
                ssl_certfile=tls_cert,
                ssl_keyfile=tls_key,
            )
        )
        self._limits = limits or Limits()
        self._counts = counts

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's for given sockets, with our protocol and a deadline for TLS handshakes."""
        assert sockets is not None
        limits = within_files(self._limits)
        loop = asyncio.get_running_loop()

        def protocol() -> GuardedProtocol:
            return GuardedProtocol(
                limits,
                self._counts,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                _loop=loop,
            )

        handshake = limits.handshake_s if self.config.ssl is not None else None
        self.servers = [
            await loop.create_server(
                protocol,
                sock=each,
                ssl=self.config.ssl,
                backlog=self.config.backlog,
                ssl_handshake_timeout=handshake,
            )
            for each in sockets
        ]
        self.started = True


def within_files(limits: Limits) -> Limits:
    """`limits` with no more connections than this process may open files. Raises the soft limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            log.warning("only %d files may be open: at most %d connections", soft, soft - SPARE_FILES)
            return Limits(**{**vars(limits), "connections": max(1, soft - SPARE_FILES)})
    return limits
