"""A trainer process that a flow run drives: the first becomes the flow run's command, the others serve."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch.distributed as dist

from infra.skypilot.rank import prepend
from sprawl.run.launch import drive
from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[2]

# As Prefect's engine does it: the command reports to an HTTP server that it knows from its environment.
DRIVER = """
import json, os, sys, urllib.request
import infra
facts = {"pid": os.getpid(), "python": sys.executable, "argv": sys.argv[1:], "infra": infra.__path__[0],
         "path": os.environ["PATH"], "pythonpath": os.environ["PYTHONPATH"]}
urllib.request.urlopen(urllib.request.Request(os.environ["REPORT_TO"], json.dumps(facts).encode())).read()
sys.exit(7)
"""


@pytest.fixture
def reports() -> Iterator[tuple[str, list[dict]]]:
    """A server's URL, and what was posted to it."""
    got: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    server.server_close()


def environment(**more: str) -> dict[str, str]:
    launched = ("RANK", "WORLD_SIZE", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if name not in launched} | more


@pytest.mark.parametrize("launched", [{}, {"RANK": "0", "WORLD_SIZE": "2"}], ids=["alone", "first of two"])
def test_the_first_process_becomes_the_driver(
    launched: dict[str, str], reports: tuple[str, list[dict]], tmp_path: Path
) -> None:
    """It is replaced, so that signals reach the driver and its exit code is the job's; and the driver is the one of
    this environment and imports this checkout, whatever else is on the machine."""
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\nexit 99\n")
    other.chmod(0o755)
    url, got = reports
    more = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": "/elsewhere", "REPORT_TO": url}
    process = subprocess.Popen(
        [sys.executable, "-m", "infra.skypilot.rank", "python", "-c", DRIVER, "flow-run", "execute"],
        cwd=ROOT,
        env=environment(**launched, **more),
    )
    assert process.wait(120 * PATIENCE) == 7
    (facts,) = got
    assert facts["pid"] == process.pid
    assert facts["argv"] == ["flow-run", "execute"]
    assert Path(facts["infra"]) == ROOT / "infra"
    assert facts["path"].split(os.pathsep)[:2] == [str(Path(sys.executable).parent), str(tmp_path)]
    assert facts["pythonpath"].split(os.pathsep) == [str(ROOT), "/elsewhere"]


def test_every_other_process_serves_until_it_is_told_to_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reports: tuple[str, list[dict]]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    url, got = reports
    process = subprocess.Popen(
        [sys.executable, "-m", "infra.skypilot.rank", "python", "-c", DRIVER],
        cwd=ROOT,
        env=environment(RANK="1", REPORT_TO=url, **place),
    )
    try:
        for name, value in {"RANK": "0", **place}.items():
            monkeypatch.setenv(name, value)
        driver, _ = drive(2, 2, tmp_path, 1, 120 * PATIENCE)
        driver.check()
        driver.close()
        assert process.wait(120 * PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
    assert got == []  # the command was the first process's to run


@pytest.mark.parametrize(
    ("before", "default", "after"),
    [
        (None, "/bin", f"/mine{os.pathsep}/bin"),
        (None, "", "/mine"),
        ("", "/bin", "/mine"),  # nothing behind it: an empty entry would be the current directory
        ("/a", "/bin", f"/mine{os.pathsep}/a"),
    ],
)
def test_a_directory_comes_first(before: str | None, default: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPRAWL_TEST_PATH", raising=False)
    if before is not None:
        monkeypatch.setenv("SPRAWL_TEST_PATH", before)
    prepend("SPRAWL_TEST_PATH", Path("/mine"), default)
    assert os.environ["SPRAWL_TEST_PATH"] == after
