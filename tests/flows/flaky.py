"""A way to a server that can be cut: everything passes, or nobody listens, or connections hang."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Literal

Mode = Literal["passes", "refuses", "hangs"]


class Way:
    """A TCP relay on loopback. `cut` takes effect at once, for connections that are open, too."""

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._mode: Mode = "passes"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, mode: Mode) -> None:
        self._mode = mode
        if mode == "refuses":
            self._listener.close()
            with self._lock:
                for connection in self._open:
                    _close(connection)

    def close(self) -> None:
        self.cut("refuses")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), socket.create_connection(self._server) as server:
            with self._lock:
                self._open |= {client, server}
            there = threading.Thread(target=self._pump, args=(client, server), daemon=True)
            there.start()
            self._pump(server, client)
            there.join()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._mode == "passes":
                    sink.sendall(data)  # what hangs swallows everything and says nothing
        _close(sink)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()


@contextlib.contextmanager
def way_to(url: str) -> Iterator[tuple[Way, str]]:
    """A way to the server of an API URL, and the URL through it."""
    address, _, path = url.removeprefix("http://").partition("/")
    host, _, port = address.partition(":")
    way = Way(host, int(port))
    try:
        yield way, f"http://127.0.0.1:{way.port}/{path}"
    finally:
        way.close()
