"""Which local TCP port is free, and who holds one that is not."""

from __future__ import annotations

import socket

import psutil

from sprawl.errors import SprawlError


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now. Raises SprawlError for a number that is not a port."""
    if not 1 <= port <= 65535:
        raise SprawlError(f"{port} is not a TCP port", "choose one between 1024 and 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Servers set this too: a port whose last connections are still in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def holder(port: int) -> str | None:
    """`name (pid N)` of the process listening on a port; None when that is not ours to see."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.AccessDenied, OSError):
        return None
    for connection in connections:
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        if listens and connection.pid:
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                return f"pid {connection.pid}"
    return None


def next_free(start: int, tries: int = 50) -> int:
    """The first free port from `start` on. Raises SprawlError when none of `tries` is."""
    for port in range(start, min(start + tries, 65536)):
        if is_free(port):
            return port
    raise SprawlError(f"no free port between {start} and {start + tries - 1}", "choose one with --port")
