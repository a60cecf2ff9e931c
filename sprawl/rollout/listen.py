"""Where a sidecar listens and how others reach it. Checked before anything else starts."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Protocol

from sprawl.errors import SprawlError


class Listening(Protocol):
    """The settings this module reads."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def token(self) -> str | None: ...
    @property
    def registered(self) -> bool: ...
    @property
    def advertise_url(self) -> str | None: ...
    @property
    def tls_cert(self) -> str | None: ...


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(settings: Listening) -> socket.socket:
    """A listening socket. Raises SprawlError: the port is taken, the host is not ours, or it is reachable from
    outside and there is no token."""
    host, port = settings.host, settings.port
    if not is_loopback(host) and not settings.token:
        raise SprawlError(
            f"host {host} is reachable from outside and there is no token",
            "set SPRAWL_TOKEN to a secret on the island and on its clients, or use --host 127.0.0.1",
        )
    if settings.registered and settings.advertise_url is None and host in ("0.0.0.0", "::"):
        raise SprawlError(
            f"host {host} is no address that others could use", "say where they reach it with --advertise-url"
        )
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        raise SprawlError(f"host {host} does not resolve", "give an address of this machine with --host") from None
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise SprawlError(
                f"port {port} on {host} is taken", "choose another with --port, or --port 0 for any free one"
            ) from None
        raise SprawlError(f"cannot listen on {host} port {port}: {error.strerror}", "see --host and --port") from None
    return listener


def base_url(settings: Listening, listener: socket.socket) -> str:
    """The URL others are told: the advertised one, else the address the socket listens on."""
    if settings.advertise_url is not None:
        return settings.advertise_url.rstrip("/")
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"
