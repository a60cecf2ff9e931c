"""An HTTP server in front of another one that fails some requests: before it passes them on, or after."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_ERROR = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"


@dataclass
class Faults:
    """How many of the next requests are answered with `status`; `after`: once they have been carried out."""

    left: int = 0
    status: int = 500
    after: bool = False
    answered: int = 0  # with an error, so far


@contextmanager
def in_front_of(url: str) -> Iterator[tuple[str, Faults]]:
    """The faulty server's URL, and what it does wrong: nothing at first."""
    target, faults, lock = urlsplit(url), Faults(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _relay(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with lock:
                fails = faults.left > 0
                faults.left -= fails
                faults.answered += fails
            if fails and not faults.after:
                return self._answer(faults.status, {"Content-Type": "application/xml"}, _ERROR)
            # The Host header stays as it came: it is part of what the client signed.
            back = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
            back.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                back.putheader(name, value)
            back.endheaders(body)
            answer = back.getresponse()
            content = answer.read()
            back.close()
            if fails:
                return self._answer(faults.status, {"Content-Type": "application/xml"}, _ERROR)
            kept = {k: v for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")}
            return self._answer(answer.status, kept, content)

        def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response_only(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", faults
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
