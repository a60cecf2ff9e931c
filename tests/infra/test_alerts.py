"""The alerts as people get them: a real server decides, and calls a webhook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from infra import ports
from infra.stack import Stack

STILL_S = 10.0
"""The shortest that Prefect waits for what does not come; a real installation waits for half an hour."""

EXPECTED = [
    "Run still stands still | still: nothing published for half an hour",
    "Run drifting: the mismatch drifts | drifting: the mismatch doubled (step 7)",
    "Run drifting needs attention | drifting: the reward fell (step 7)",
    "Run losing: islands are being lost | losing: three islands lost in ten minutes, last: an island ended",
]


class Webhook:
    """What a team's chat would be: keeps the texts it is sent."""

    def __init__(self) -> None:
        texts: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                texts.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["text"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        self.texts = texts
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    hook = Webhook()
    yield hook
    hook.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_alert_reaches_a_webhook_for_the_run_it_is_about_and_for_no_other(
    webhook: Webhook, tmp_path: Path
) -> None:
    stack = Stack(tmp_path / ".sprawl")
    try:
        info = stack.up(ports.next_free(4300), wait_s=600.0)
        environment = os.environ | stack.environment(info.api_url)
        subprocess.run(
            [sys.executable, "-m", "tests.infra.telling", webhook.url, str(STILL_S)],
            env=environment,
            check=True,
            timeout=300,
        )
        deadline = time.monotonic() + 120.0
        while not set(EXPECTED) <= set(webhook.texts) and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(STILL_S)  # for what should not come
    finally:
        stack.down()
    assert sorted(webhook.texts) == sorted(EXPECTED)
