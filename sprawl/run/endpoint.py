"""HTTP endpoint of a trainer: `/metrics` for Prometheus, and `/targets`, where Prometheus finds the run's islands.

Islands come and go, so no file can list them: `/targets` is what `http_sd_configs` reads, made from the heartbeats on
the board. With SPRAWL_TOKEN set every route but /health needs it, as with islands.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from sprawl.board.ledger import is_live
from sprawl.board.records import IslandRecord
from sprawl.errors import SprawlError
from sprawl.listening import is_loopback, listen_on, url_of

log = logging.getLogger(__name__)

TEXT = "text/plain; version=0.0.4; charset=utf-8"
JSON = "application/json"
REQUEST_S = 10.0
"""How long a client may take for one request."""


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, or a port alone on 127.0.0.1; IPv6 as [::1]:9464. Raises SprawlError."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise SprawlError(f"{text!r} is no address to listen on", "give HOST:PORT, for example 127.0.0.1:9464")
    return host.strip("[]") or "127.0.0.1", int(port)


def targets(islands: list[IslandRecord], run_id: str) -> list[dict[str, Any]]:
    """Live islands as Prometheus's HTTP service discovery wants them: one entry each, with its scheme and its name."""
    found = []
    for island in islands:
        url = urlsplit(island.url)
        if url.hostname and is_live(island):
            labels = {"run_id": run_id, "island_id": island.island_id, "__scheme__": url.scheme}
            found.append({"targets": [url.netloc], "labels": labels})
    return found


def bind(address: str, token: str | None) -> tuple[socket.socket, str]:
    """A listening socket at HOST:PORT and the URL of what answers there.

    Raises SprawlError: the address is taken or not ours, or reachable from outside while there is no token.
    """
    host, port = parse_address(address)
    if not is_loopback(host) and not token:
        raise SprawlError(
            f"{address} is reachable from outside and there is no token",
            "set SPRAWL_TOKEN to a secret for Prometheus too, or listen on 127.0.0.1",
        )
    listener = listen_on(host, port, option="--metrics", any_port=f"--metrics {host}:0")
    return listener, url_of(host, listener, tls=False)


def bind_as_asked(asked: str | None, environment: Mapping[str, str] = os.environ) -> tuple[socket.socket, str] | None:
    """Where a run answers: at `asked`, else at SPRAWL_METRICS; None: nowhere.

    Raises SprawlError when `asked` cannot be. An address of the environment, which many processes share, that is taken
    is only warned about: a run that another one's remains hold up could not be resumed.
    """
    token = environment.get("SPRAWL_TOKEN") or None
    if asked:
        return bind(asked, token)
    address = environment.get("SPRAWL_METRICS")
    if not address:
        return None
    try:
        return bind(address, token)
    except SprawlError as error:
        log.warning("no metrics for Prometheus: %s", error)
        return None


class Endpoint:
    """Answers on `listener` (see `bind`) from the start until `close`. Nothing it does holds up or fails the run."""

    def __init__(
        self,
        listener: socket.socket,
        run_id: str,
        render: Callable[[], str],
        islands: Callable[[], list[IslandRecord]],
        token: str | None,
    ) -> None:
        pages = {
            "/metrics": lambda: (TEXT, render()),
            "/targets": lambda: (JSON, json.dumps(targets(islands(), run_id))),
        }
        address = listener.getsockname()[:2]
        self._server = ThreadingHTTPServer(address, _handler(pages, token), bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listener
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="metrics-endpoint")
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(pages: dict[str, Callable[[], tuple[str, str]]], token: str | None) -> type[BaseHTTPRequestHandler]:
    expected = f"Bearer {token}".encode() if token else None

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            given = self.headers.get("Authorization", "").encode("latin-1")
            if path == "/health":
                self._answer(200, TEXT, "ok\n")
            elif expected is not None and not hmac.compare_digest(given, expected):
                self._answer(401, TEXT, "this trainer needs 'Authorization: Bearer <token>' (its SPRAWL_TOKEN)\n")
            elif path not in pages:
                self._answer(404, TEXT, f"no {path} here; there are {', '.join(pages)} and /health\n")
            else:
                self._page(pages[path])

        def _page(self, make: Callable[[], tuple[str, str]]) -> None:
            try:
                kind, body = make()
            except Exception as error:  # the board may be away for a moment: the next scrape asks again
                log.debug("metrics not rendered", exc_info=True)
                self._answer(503, TEXT, f"{error}\n")
            else:
                self._answer(200, kind, body)

        def _answer(self, status: int, kind: str, body: str) -> None:
            data = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Scrapes are not worth a line each."""

    return Handler
