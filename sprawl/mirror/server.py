"""The mirror's HTTP side: plain GET and HEAD of immutable objects.

    GET /v1/objects/<key>    a blob or a manifest; HEAD the same without the bytes
    GET /health              200 while the board can be read, else 503; needs no token
    GET /metrics             Prometheus text

`Prefer: wait=N` (RFC 7240) holds a request for a manifest that is not there yet, or a blob that is being fetched, for
at most N seconds; without it a manifest is not waited for and a blob for 30 s. `Cache-Control: no-cache` makes the
mirror check what it has on disk again.

404 the board does not have it; 401 no token; 403 not relayed, ask the board; 503 ask the board, or, when `Retry-After`
is given, ask again.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Mapping
from typing import BinaryIO

from starlette.types import Receive, Scope, Send

from sprawl.mirror.objects import MAX_WAIT_S, ROUTE, BlobKey, ManifestKey, parse, wait_of
from sprawl.mirror.relay import Relay, StillFetching, Unavailable

CHUNK = 1 << 20
Headers = Mapping[str, str]


class Server:
    """The ASGI application. With `token`, everything but /health needs it as bearer token."""

    def __init__(self, relay: Relay, *, token: str | None = None) -> None:
        self._relay = relay
        self._expected = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if method not in ("GET", "HEAD"):
            await self._refuse(send, 405, "ReadOnly", "a mirror can only be read: GET and HEAD", {"Allow": "GET, HEAD"})
        elif path == "/health":
            error = self._relay.board_error
            await _reply(send, 503 if error else 200, {}, json.dumps({"ready": not error, "board_error": error}))
        elif self._expected and not hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            message = "this mirror needs 'Authorization: Bearer <token>' (its SPRAWL_MIRROR_TOKEN)"
            await self._refuse(send, 401, "Unauthorized", message, {"WWW-Authenticate": "Bearer"})
        elif path == "/metrics":
            await _reply(send, 200, {}, metrics(self._relay), "text/plain; version=0.0.4")
        elif path.startswith(ROUTE):
            await self._object(parse(path.removeprefix(ROUTE)), headers, method == "HEAD", receive, send)
        else:
            message = f"no {path} here; there are GET {ROUTE}<key>, GET /health, GET /metrics"
            await self._refuse(send, 404, "NoSuchRoute", message)

    async def _object(
        self, key: BlobKey | ManifestKey | None, headers: dict[bytes, bytes], head: bool, receive: Receive, send: Send
    ) -> None:
        wait_s = wait_of(headers.get(b"prefer", b"").decode("latin-1"))
        suspect = b"no-cache" in headers.get(b"cache-control", b"")
        try:
            match key:
                case ManifestKey():
                    data = await self._relay.manifest(key, wait_s or 0.0)
                    if data is None:
                        await self._refuse(send, 404, "NotThere", f"{key.key} is not on the board")
                        return
                    self._count("manifest", 200, 0 if head else len(data))
                    await _reply(send, 200, {}, b"" if head else data, "application/json", len(data))
                case BlobKey():
                    held = await self._relay.blob(key, MAX_WAIT_S if wait_s is None else wait_s, suspect=suspect)
                    if held is None:
                        await self._refuse(send, 404, "NotThere", f"{key.key} is not on the board")
                        return
                    await self._send_blob(key, *held, head, receive, send)
                case None:
                    await self._refuse(send, 403, "NotRelayed", "mirrors relay blobs and manifests; ask the board")
        except StillFetching:
            message = "still on its way from the board"
            await self._refuse(send, 503, "StillFetching", message, {"Retry-After": "0"})
        except Unavailable as error:
            await self._refuse(send, 503, "Unavailable", str(error))

    async def _send_blob(
        self, key: BlobKey, file: BinaryIO, size: int, head: bool, receive: Receive, send: Send
    ) -> None:
        headers = {"ETag": f'"{key.digest}"', "Cache-Control": "max-age=31536000, immutable"}
        with file:
            if head or size <= CHUNK:
                self._count("blob", 200, 0 if head else size)
                await _reply(send, 200, headers, b"" if head else file.read(), "application/octet-stream", size)
                return
            self._count("blob", 200, 0)
            await _start(send, 200, headers, "application/octet-stream", size)
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                while (chunk := await asyncio.to_thread(file.read, CHUNK)) and not gone.done():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    self._relay.totals.sent_bytes += len(chunk)
                if not gone.done():
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                gone.cancel()

    def _count(self, kind: str, status: int, sent: int) -> None:
        self._relay.totals.count(kind, status)
        self._relay.totals.sent_bytes += sent

    async def _refuse(self, send: Send, status: int, kind: str, message: str, headers: Headers | None = None) -> None:
        self._count("refusal", status, 0)
        await _reply(send, status, headers or {}, json.dumps({"error": {"type": kind, "message": message}}))


def metrics(relay: Relay) -> str:
    """Prometheus text."""
    totals, cache = relay.totals, relay.cache
    lines: list[str] = []

    def add(name: str, kind: str, help_text: str, value: int | Mapping[str, int]) -> None:
        lines.append(f"# HELP sprawl_mirror_{name} {help_text}")
        lines.append(f"# TYPE sprawl_mirror_{name} {kind}")
        rows = value if isinstance(value, Mapping) else {"": value}
        lines.extend(f"sprawl_mirror_{name}{labels} {number}" for labels, number in rows.items())

    responses = {f'{{kind="{kind}",status="{status}"}}': n for (kind, status), n in totals.responses.items()}
    add("responses_total", "counter", "Requests answered.", responses)
    add("sent_bytes_total", "counter", "Bytes of objects sent to readers.", totals.sent_bytes)
    add("board_requests_total", "counter", "Requests to the board.", totals.board_requests)
    add("board_bytes_total", "counter", "Bytes fetched from the board.", totals.board_bytes)
    add("board_failures_total", "counter", "Requests to the board that failed.", totals.board_failures)
    add("waiting_readers", "gauge", "Readers held until a version appears.", totals.waiting)
    add("cache_bytes", "gauge", "Bytes of blobs on disk.", cache.used)
    add("cache_blobs", "gauge", "Blobs on disk.", len(cache))
    add("evicted_total", "counter", "Blobs deleted to make room.", cache.evicted)
    add("damaged_total", "counter", "Blobs on disk that no longer had their digest.", cache.damaged)
    return "\n".join(lines) + "\n"


async def _start(send: Send, status: int, headers: Headers, content_type: str, size: int) -> None:
    fields = {"Content-Type": content_type, "Content-Length": str(size), **headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def _reply(
    send: Send,
    status: int,
    headers: Headers,
    body: bytes | str,
    content_type: str = "application/json",
    size: int | None = None,
) -> None:
    """A whole answer; `size` is announced where the body is left out (HEAD)."""
    data = body.encode() if isinstance(body, str) else body
    await _start(send, status, headers, content_type, len(data) if size is None else size)
    await send({"type": "http.response.body", "body": data, "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
