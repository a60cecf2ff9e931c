"""HTTP/1.1 for reading only: requests without a body in, bytes or a whole file out, by `sendfile` where the kernel can.

A thousand readers of one large blob cost neither copies nor memory in this process, which is why no general server is
used. What is not a plain GET-like request is refused and the connection closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import BinaryIO
from urllib.parse import unquote

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 << 10
IDLE_S = 75.0  # for the next request on a connection; longer than a reader's pause between two versions, often
SEND_S = 60.0  # for an answer to be taken, and more for a large one:
SLOWEST = 100e3  # bytes per second

_REQUEST_LINE = re.compile(r"([A-Z]{1,10}) (/[\x21-\x7e]*) HTTP/1\.([01])")


@dataclass(frozen=True)
class Request:
    """`path` is decoded and without query; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    keep_alive: bool


@dataclass
class Answer:
    """`file`: the body, from its beginning; it is closed when it was sent. HEAD: `body` and `file` are not sent."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    file: BinaryIO | None = None
    size: int = 0  # of the file


class Malformed(Exception):
    """400: not a request that this server understands."""


Handler = Callable[[Request], Awaitable[Answer]]


async def _busy(request: Request) -> Answer:
    return Answer(503, b'{"error": {"type": "Busy", "message": "too many connections; ask the board"}}')


def parse(head: bytes) -> Request:
    """A request's head, with its final empty line. Raises Malformed."""
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    match = _REQUEST_LINE.fullmatch(lines[0])
    if match is None:
        raise Malformed("not an HTTP/1.1 request")
    headers = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise Malformed("a malformed header")
        headers[name.lower()] = value.strip()
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        raise Malformed("a request with a body")
    keep_alive = match[3] == "1" and "close" not in headers.get("connection", "").lower()
    return Request(match[1], unquote(match[2].partition("?")[0]), headers, keep_alive)


class HttpServer:
    """Answers on a listening socket until it is stopped. `answer` is called for every request."""

    def __init__(self, answer: Handler, max_connections: int) -> None:
        self._answer = answer
        self._max_connections = max_connections
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        self._server = await asyncio.start_server(
            self._serve, sock=listener, limit=MAX_HEAD_BYTES, ssl=tls, backlog=2048
        )

    async def stop(self, grace_s: float) -> None:
        """Accept no more, let what is being answered end for a while, then close."""
        if self._server is None:
            return
        self._server.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=grace_s)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        full = len(self._connections) >= self._max_connections
        self._connections.add(task)
        try:
            while await self._one(reader, writer, self._answer if not full else _busy):
                pass
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the other side left, stalled, or talks something else
        except asyncio.CancelledError:
            pass  # stopped
        except Exception:
            log.exception("a request could not be answered")
        finally:
            self._connections.discard(task)
            writer.transport.abort() if task.cancelling() else writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer_to: Handler) -> bool:
        """Answer one request. True when another may follow."""
        async with asyncio.timeout(IDLE_S):
            head = await reader.readuntil(b"\r\n\r\n")
        try:
            request = parse(head)
        except Malformed as error:
            body = f'{{"error": {{"type": "BadRequest", "message": "{error}"}}}}'.encode()
            await self._send(writer, Answer(400, body), keep_alive=False, head=False)
            return False
        answer = await answer_to(request)
        keep_alive = request.keep_alive and answer_to is not _busy
        with answer.file or contextlib.nullcontext():
            await self._send(writer, answer, keep_alive=keep_alive, head=request.method == "HEAD")
        return keep_alive

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer, *, keep_alive: bool, head: bool) -> None:
        size = answer.size if answer.file is not None else len(answer.body)
        fields = {"Content-Type": answer.content_type, "Content-Length": str(size), **answer.headers}
        if not keep_alive:
            fields["Connection"] = "close"
        lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        start = "\r\n".join([*lines, "", ""]).encode("latin-1")
        async with asyncio.timeout(SEND_S + size / SLOWEST):
            writer.write(start if head or answer.file is not None else start + answer.body)
            await writer.drain()
            if answer.file is not None and size and not head:
                await asyncio.get_running_loop().sendfile(writer.transport, answer.file, 0, size)
