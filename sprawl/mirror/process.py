"""A mirror as one process: its relay behind HTTP, its heartbeat on the board."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sprawl.board.records import MirrorRecord
from sprawl.board.store import Store
from sprawl.errors import SprawlError
from sprawl.listening import is_loopback, listen_on, url_of
from sprawl.mirror.cache import DiskCache
from sprawl.mirror.http import HttpServer
from sprawl.mirror.registry import forget_lost, register, unregister
from sprawl.mirror.relay import FETCHES, Relay
from sprawl.mirror.server import Answers

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
GRACE_S = 2.0  # for what is being sent when the mirror is asked to stop
POLL_S = 0.25  # how often the board is asked for a version that readers wait for


@dataclass(frozen=True)
class MirrorSettings:
    """How to run one mirror."""

    region: str
    host: str
    port: int  # 0: any free one
    cache: Path
    cache_bytes: int
    mirror_id: str | None = None
    advertise_url: str | None = None
    token: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    max_connections: int = 8192
    exit_with_parent: bool = False


def bind(settings: MirrorSettings) -> socket.socket:
    """A listening socket. Raises SprawlError: the port is taken, the host is not ours, or it is reachable from outside
    and there is no token."""
    if not is_loopback(settings.host) and not settings.token:
        raise SprawlError(
            f"host {settings.host} is reachable from outside and there is no token",
            "set SPRAWL_MIRROR_TOKEN to a secret on the mirror and on its readers, or listen on 127.0.0.1",
        )
    if settings.advertise_url is None and settings.host in ("0.0.0.0", "::"):
        raise SprawlError(
            f"host {settings.host} is no address that others could use",
            "say where they reach it with --advertise-url",
        )
    return listen_on(settings.host, settings.port, option="--listen", any_port="port 0")


def run_mirror(
    settings: MirrorSettings, board: Store, listener: socket.socket, parent: int, say: Callable[[str], None]
) -> None:
    """Serve on `listener` until SIGTERM or SIGINT. `parent` is the process that started this one, as it was then.

    Raises SprawlError when the cache or the certificate cannot be used.
    """
    try:
        _raise_file_limit(settings.max_connections)
        cache = DiskCache(settings.cache, settings.cache_bytes)
        asyncio.run(_Mirror(settings, board, cache, listener, say).run(parent))
    finally:
        listener.close()


class _Mirror:
    def __init__(
        self,
        settings: MirrorSettings,
        board: Store,
        cache: DiskCache,
        listener: socket.socket,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._board = board
        self._cache = cache
        self._listener = listener
        self._say = say
        self._mirror_id = settings.mirror_id or f"mirror-{secrets.token_hex(3)}"
        own = url_of(settings.host, listener, tls=settings.tls_cert is not None)
        self._url = (settings.advertise_url or own).rstrip("/")
        self._started_at = time.time()
        self._tls = _tls_context(settings)
        self._stop = asyncio.Event()

    async def run(self, parent: int) -> None:
        loop = asyncio.get_running_loop()
        # Fetches that take minutes must not keep heartbeats and looks for versions waiting.
        loop.set_default_executor(ThreadPoolExecutor(FETCHES + 12, thread_name_prefix="board"))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        relay = Relay(self._board, self._cache, poll_s=POLL_S)
        server = HttpServer(Answers(relay, token=self._settings.token), self._settings.max_connections)
        await server.start(self._listener, self._tls)
        tasks = [asyncio.ensure_future(self._heartbeats())]
        if self._settings.exit_with_parent:
            tasks.append(asyncio.ensure_future(self._watch_parent(parent)))
        self._say(f"{self._mirror_id} relays {self._board.url} at {self._url} for region {self._settings.region}")
        try:
            await self._stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._leave()
            await server.stop(GRACE_S)
            await relay.close()
            self._cache.close()

    def _record(self) -> MirrorRecord:
        return MirrorRecord(
            mirror_id=self._mirror_id,
            region=self._settings.region,
            url=self._url,
            started_at=self._started_at,
            heartbeat_at=time.time(),
            interval_s=HEARTBEAT_S,
            pid=os.getpid(),
        )

    async def _heartbeats(self) -> None:
        try:
            await asyncio.to_thread(forget_lost, self._board, self._settings.region)
        except (SprawlError, OSError) as error:
            log.warning("records of lost mirrors stay: %s", error)
        while True:
            try:
                await asyncio.to_thread(register, self._board, self._record())
            except (SprawlError, OSError) as error:
                log.warning("heartbeat not written: %s", error)  # relaying goes on; the next one may get through
            await asyncio.sleep(HEARTBEAT_S)

    async def _leave(self) -> None:
        try:
            await asyncio.to_thread(unregister, self._board, self._record())
        except (SprawlError, OSError) as error:
            log.warning("the mirror's record was not removed: %s", error)

    async def _watch_parent(self, parent: int) -> None:
        while os.getppid() == parent:
            await asyncio.sleep(1.0)
        self._say(f"{self._mirror_id}: the process that started it is gone")
        self._stop.set()


def _tls_context(settings: MirrorSettings) -> ssl.SSLContext | None:
    """Raises SprawlError when the certificate or its key cannot be used."""
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise SprawlError(f"{settings.tls_cert} cannot be used: {error}", "check --tls-cert and --tls-key") from None
    return context


def _raise_file_limit(connections: int) -> None:
    """A connection and an open blob each need a descriptor; many systems begin with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
