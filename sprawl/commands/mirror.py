"""`sprawl mirror`: a regional relay of a board."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path

import click

from sprawl.errors import SprawlError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@click.command()
@click.argument("board", envvar="SPRAWL_BOARD")
@click.option(
    "--listen",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Address to listen on; port 0 takes a free one. Outside loopback SPRAWL_MIRROR_TOKEN must be set; if "
    "set, requests need it.",
)
@click.option(
    "--region",
    envvar="SPRAWL_REGION",
    default="default",
    show_default=True,
    show_envvar=True,
    help="Readers that are started with the same region ask here first.",
)
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".sprawl/mirror"),
    show_default=True,
    help="Directory for blobs. What an earlier mirror left there is used.",
)
@click.option("--cache-size", default="20GB", show_default=True, help="Bytes on disk: 500MB, 20GB ...")
@click.option("--mirror-id", default=None, help="Name on the board; default: a random one.")
@click.option("--advertise-url", default=None, help="URL others reach it at, where that is not http://HOST:PORT.")
@click.option(
    "--tls-cert", type=click.Path(exists=True, dir_okay=False), default=None, help="Certificate (PEM): serve https."
)
@click.option("--tls-key", type=click.Path(exists=True, dir_okay=False), default=None, help="Its private key (PEM).")
@click.option(
    "--max-connections",
    type=click.IntRange(min=16),
    default=8192,
    show_default=True,
    help="Readers at once; others are sent to the board.",
)
@click.option("--exit-with-parent", is_flag=True, help="Stop when the process that started this one ends.")
def mirror(
    board: str,
    listen: str,
    region: str,
    cache: Path,
    cache_size: str,
    mirror_id: str | None,
    advertise_url: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    max_connections: int,
    exit_with_parent: bool,
) -> None:
    """Relay the versions of a board to the readers of a region.

    Each object is fetched from the board once, however many readers ask. The mirror registers on the board; islands
    that are started with the same --region find it there. They check everything it sends, and ask the board when it is
    gone, slow or wrong, so it need not be trusted. It relays blobs and manifests only, and needs no write access beyond
    its own record under .mirrors/.

    \b
    Example, on a machine in eu-west-1 and on an island next to it:
      SPRAWL_MIRROR_TOKEN=... sprawl mirror s3://bucket/runs --region eu-west-1 --listen 10.0.0.5:8400
      SPRAWL_MIRROR_TOKEN=... sprawl island --board s3://bucket/runs --region eu-west-1 ...
    Look inside:
      curl -s localhost:8400/metrics
    """
    if (tls_cert is None) != (tls_key is None):
        raise SprawlError("--tls-cert and --tls-key belong together", "give both or none")
    from sprawl.board.store import open_store
    from sprawl.mirror.process import MirrorSettings, bind, run_mirror
    from sprawl.mirror.registry import check_name

    parent = os.getppid()
    host, port = address(listen)
    settings = MirrorSettings(
        region=check_name(region, "--region"),
        host=host,
        port=port,
        cache=cache,
        cache_bytes=byte_count(cache_size, "--cache-size"),
        mirror_id=check_name(mirror_id, "--mirror-id") if mirror_id else None,
        advertise_url=advertise_url,
        token=os.environ.get("SPRAWL_MIRROR_TOKEN") or None,
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_connections=max_connections,
        exit_with_parent=exit_with_parent,
    )
    listener = bind(settings)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    run_mirror(settings, open_store(board), listener, parent, click.echo)


def address(text: str) -> tuple[str, int]:
    """HOST:PORT, [HOST]:PORT or PORT alone (loopback). Raises SprawlError."""
    match = re.fullmatch(r"(?:(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[^:\[\]]+)):)?(?P<port>\d{1,5})", text)
    if match is None or int(match["port"]) > 65535:
        raise SprawlError(f"--listen {text!r} is no address", "write HOST:PORT, for example 127.0.0.1:8400")
    return match["v6"] or match["name"] or "127.0.0.1", int(match["port"])


def byte_count(text: str, option: str) -> int:
    """Bytes of `500MB`, `20GB` (powers of 1000). Raises SprawlError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)b?\s*", text.lower())
    count = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if count < 1:
        raise SprawlError(f"{option} {text!r} is no size", "write for example 500MB or 20GB")
    return count
