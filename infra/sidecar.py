"""A sidecar for a while: serves any version of a run to one caller, outside the run's fleet."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from infra import ports
from infra.processes import ProcessId, end_tree, spawn, tail
from sprawl.errors import SprawlError

FIRST_PORT = 8400


@contextmanager
def temporary_sidecar(
    board: str, run_id: str, name: str, *, log: Path, threads: int, wait_s: float = 120.0
) -> Iterator[str]:
    """Start `sprawl sidecar` on a free local port; yields its base URL and stops it in the end.

    It follows on demand, so that it serves exactly the version it is asked for, older ones included. Raises
    SprawlError, with the end of its log, when it ends or does not listen within `wait_s`.
    """
    port = ports.next_free(FIRST_PORT)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sprawl.cli", "sidecar", "--board", board, "--run-id", run_id]
    command += ["--island-id", name, "--port", str(port), "--follow", "demand", "--max-wait", "120"]
    command += ["--exit-with-parent"]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    process = spawn(command, log=log, env=env)
    identity = ProcessId.of(process.pid)
    try:
        deadline = time.monotonic() + wait_s
        while not _listens(url):
            if process.poll() is not None:
                raise SprawlError(f"the sidecar ended with code {process.returncode}; the end of {log}:\n{tail(log)}")
            if time.monotonic() > deadline:
                raise SprawlError(f"the sidecar did not answer within {wait_s:.0f} s", f"see {log}")
            time.sleep(0.2)
        yield url
    finally:
        if identity is not None:
            end_tree([identity], grace_s=5.0)
        process.wait()


def _listens(url: str) -> bool:
    try:
        httpx.get(f"{url}/server_info", timeout=2.0)
    except httpx.HTTPError:
        return False
    return True
