"""A listening socket for a server of ours, and what may be reached from where."""

from __future__ import annotations

import errno
import ipaddress
import socket

from sprawl.errors import SprawlError


class AddressTaken(SprawlError):
    """Somebody else listens there."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_on(host: str, port: int, *, option: str, any_port: str) -> socket.socket:
    """A listening socket; port 0 takes any free one. `option` and `any_port` say what a user would change and how to
    ask for any port.

    Raises AddressTaken, and SprawlError when the host is not ours.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        raise SprawlError(f"host {host} does not resolve", "give an address of this machine") from None
    # With the protocol named: asyncio turns Nagle's algorithm off only on sockets that say that they are TCP, and with
    # it on, an answer whose head and body are written apart waits 40 ms for the other side's delayed acknowledgement.
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressTaken(
                f"port {port} on {host} is taken", f"choose another with {option}, or {any_port} for any free one"
            ) from None
        raise SprawlError(f"cannot listen on {host} port {port}: {error.strerror}", f"check {option}") from None
    return listener


def url_of(host: str, listener: socket.socket, *, tls: bool) -> str:
    """The URL of a server that listens there."""
    name = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{listener.getsockname()[1]}"
