"""How an island is to be run, where it listens and how others reach it. Light, so that a taken port is found before
anything heavy is loaded."""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from typing import Literal

from sprawl.errors import SprawlError
from sprawl.rollout.gate import CommitMode
from sprawl.rollout.targets import Follow


@dataclass(frozen=True)
class IslandSettings:
    """How to run one island. None means: as the run's own configuration says."""

    board: str
    run_id: str | None
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    island_id: str | None = None
    registered: bool = True
    advertise_url: str | None = None  # where others reach the sidecar; default: what it listens on
    follow: Follow | None = None
    commit_mode: CommitMode = "in_place"
    max_wait_s: float = 30.0
    max_requests: int = 256  # held at once, waiting ones included
    threads: int | None = None
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    engine: str | None = None
    engine_args: str = ""  # more arguments for an engine that is a server of its own
    cache: str | None = None  # where the checkpoint is kept on disk; None: see `engines.work_directory`
    follow_latest_run: bool = False
    exit_with_parent: bool = False
    token: str | None = None
    insecure: bool = False  # reachable from outside without a token
    tls_cert: str | None = None
    tls_key: str | None = None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(settings: IslandSettings) -> socket.socket:
    """A listening socket. Raises SprawlError: the port is taken, the host is not ours, it is reachable from outside
    and there is no token, or certificate and key do not fit."""
    host, port = settings.host, settings.port
    if not is_loopback(host) and not settings.token and not settings.insecure:
        raise SprawlError(
            f"host {host} is reachable from outside and there is no token",
            "set SPRAWL_TOKEN to a secret on the island and on its clients, use --host 127.0.0.1, "
            "or --insecure where the network itself keeps strangers out",
        )
    _check_tls(settings)
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


def _check_tls(settings: IslandSettings) -> None:
    """Now, in one line, rather than when the server starts."""
    cert, key = settings.tls_cert, settings.tls_key
    if cert is None and key is None:
        return
    if cert is None or key is None:
        raise SprawlError("--tls-cert and --tls-key belong together", "give both or none")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (ssl.SSLError, OSError) as error:
        raise SprawlError(
            f"{cert} and {key} are no certificate and its private key: {error.strerror or error}",
            "give PEM files that belong together; the key without a passphrase",
        ) from None


def base_url(settings: IslandSettings, listener: socket.socket) -> str:
    """The URL others are told: the advertised one, else the address the socket listens on."""
    if settings.advertise_url is not None:
        return settings.advertise_url.rstrip("/")
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"
