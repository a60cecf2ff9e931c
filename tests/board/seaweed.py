"""A real S3 server for tests: SeaweedFS's `weed`, which the development tools bring."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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
def running(folder: Path, bucket: str) -> Iterator[str]:
    """Start a server with an empty bucket and point this process's AWS_* variables at it; yields the endpoint URL.

    Skips the test when s3fs or `weed` is missing.
    """
    s3fs = pytest.importorskip("s3fs")
    weed = shutil.which("weed")
    if weed is None:
        pytest.skip("no `weed` on PATH")
    master, volume, filer, s3, admin = free_ports(5)
    server = subprocess.Popen(
        [
            *(weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false", f"-admin.port={admin}"),
        ],
        env={**os.environ, **CREDENTIALS},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
    )
    url = f"http://127.0.0.1:{s3}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        try:
            for _ in range(120):
                try:
                    s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False).mkdir(bucket)
                    break
                except Exception:
                    time.sleep(0.5)
            else:
                pytest.fail("the S3 server did not start")
            yield url
        finally:
            server.kill()  # its data is thrown away; an orderly stop can take 15 s
            server.wait()
