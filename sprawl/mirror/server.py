"""What a mirror answers: plain GET and HEAD of immutable objects.

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

import hmac
import json
from collections.abc import Mapping

from sprawl.exposition import Labels, Page
from sprawl.mirror.http import Answer, Request
from sprawl.mirror.objects import MAX_WAIT_S, ROUTE, BlobKey, ManifestKey, parse, wait_of
from sprawl.mirror.relay import Relay, StillFetching, Unavailable

Headers = Mapping[str, str]


class Answers:
    """With `token`, everything but /health needs it as bearer token."""

    def __init__(self, relay: Relay, *, token: str | None = None) -> None:
        self._relay = relay
        self._expected = f"Bearer {token}".encode() if token else None

    async def __call__(self, request: Request) -> Answer:
        path, given = request.path, request.headers.get("authorization", "").encode("latin-1")
        if request.method not in ("GET", "HEAD"):
            return self._refuse(405, "ReadOnly", "a mirror can only be read: GET and HEAD", {"Allow": "GET, HEAD"})
        if path == "/health":
            error = self._relay.board_error
            return Answer(503 if error else 200, json.dumps({"ready": not error, "board_error": error}).encode())
        if self._expected and not hmac.compare_digest(given, self._expected):
            message = "this mirror needs 'Authorization: Bearer <token>' (its SPRAWL_MIRROR_TOKEN)"
            return self._refuse(401, "Unauthorized", message, {"WWW-Authenticate": "Bearer"})
        if path == "/metrics":
            return Answer(200, metrics(self._relay).encode(), "text/plain; version=0.0.4")
        if not path.startswith(ROUTE):
            message = f"no {path} here; there are GET {ROUTE}<key>, GET /health, GET /metrics"
            return self._refuse(404, "NoSuchRoute", message)
        try:
            return await self._object(parse(path.removeprefix(ROUTE)), request)
        except StillFetching:
            return self._refuse(503, "StillFetching", "still on its way from the board", {"Retry-After": "0"})
        except Unavailable as error:
            return self._refuse(503, "Unavailable", str(error))

    async def _object(self, key: BlobKey | ManifestKey | None, request: Request) -> Answer:
        wait_s = wait_of(request.headers.get("prefer", ""))
        head = request.method == "HEAD"
        if key is None:
            return self._refuse(403, "NotRelayed", "mirrors relay blobs and manifests; ask the board")
        if isinstance(key, ManifestKey):
            data = await self._relay.manifest(key, wait_s or 0.0)
            if data is not None:
                self._count("manifest", 200, 0 if head else len(data))
                return Answer(200, data)
        else:
            suspect = "no-cache" in request.headers.get("cache-control", "")
            held = await self._relay.blob(key, MAX_WAIT_S if wait_s is None else wait_s, suspect=suspect)
            if held is not None:
                file, size = held
                self._count("blob", 200, 0 if head else size)
                headers = {"ETag": f'"{key.digest}"', "Cache-Control": "max-age=31536000, immutable"}
                return Answer(200, b"", "application/octet-stream", headers, file, size)
        return self._refuse(404, "NotThere", f"{key.key} is not on the board")

    def _count(self, kind: str, status: int, sent: int) -> None:
        self._relay.totals.count(kind, status)
        self._relay.totals.sent_bytes += sent

    def _refuse(self, status: int, kind: str, message: str, headers: Headers | None = None) -> Answer:
        self._count("refusal", status, 0)
        body = json.dumps({"error": {"type": kind, "message": message}}).encode()
        return Answer(status, body, headers=headers or {})


def metrics(relay: Relay) -> str:
    """Prometheus text."""
    totals, cache = relay.totals, relay.cache
    page = Page("sprawl_mirror_")
    responses: dict[Labels, float] = {
        (("kind", kind), ("status", str(status))): n for (kind, status), n in totals.responses.items()
    }
    page.add("responses_total", "counter", "Requests answered.", responses)
    page.add("sent_bytes_total", "counter", "Bytes of objects that readers were answered with.", totals.sent_bytes)
    page.add("board_requests_total", "counter", "Requests to the board.", totals.board_requests)
    page.add("board_bytes_total", "counter", "Bytes fetched from the board.", totals.board_bytes)
    page.add("board_failures_total", "counter", "Requests to the board that failed.", totals.board_failures)
    page.add("waiting_readers", "gauge", "Readers held until a version appears.", totals.waiting)
    page.add("cache_bytes", "gauge", "Bytes of blobs on disk.", cache.used)
    page.add("cache_blobs", "gauge", "Blobs on disk.", len(cache))
    page.add("evicted_total", "counter", "Blobs deleted to make room.", cache.evicted)
    page.add("damaged_total", "counter", "Blobs on disk that no longer had their digest.", cache.damaged)
    return page.text()
