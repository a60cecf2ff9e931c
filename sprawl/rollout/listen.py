"""How an island is to be run, where it listens and how others reach it. Light, so that a taken port is found before
anything heavy is loaded."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from typing import Literal

from sprawl.errors import SprawlError
from sprawl.listening import is_loopback, listen_on, url_of
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
    region: str | None = None  # read through the mirrors of this region; None: the board only
    exit_with_parent: bool = False
    wait_for_run_s: float = 0.0  # how long the run may take to appear
    obey_fleet: bool = False  # end when the run's fleet says so
    exit_when_idle: float | None = None  # seconds without a request or a new version
    token: str | None = None
    insecure: bool = False  # reachable from outside without a token
    tls_cert: str | None = None
    tls_key: str | None = None


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
    return listen_on(host, port, option="--port", any_port="--port 0")


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
    return url_of(settings.host, listener, tls=settings.tls_cert is not None)
