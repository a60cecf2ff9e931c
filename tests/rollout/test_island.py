"""Islands as real processes: found by heartbeat, drained by SIGTERM, gone with their parent; and what stops a start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from sprawl.board import keys
from sprawl.errors import SprawlError
from sprawl.rollout.listen import IslandSettings, base_url, bind, is_loopback
from tests.rollout.processes import DiskRun, command, environment, process, wait_for
from tests.rollout.support import RUN


@pytest.fixture
def run(tmp_path: Path) -> DiskRun:
    return DiskRun(tmp_path / "runs")


@pytest.mark.slow
def test_an_island_from_before_the_first_version_to_the_end_of_draining(run: DiskRun, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def record(state: str, applied: int | None) -> Any:
        found = [r for r in run.ledger.islands() if r.state == state and r.applied == applied]
        return found[0] if found else None

    with process(command(run, "--island-id", "east", "--exit-with-parent"), log) as island:
        wait_for(lambda: record("starting", None), log)
        wait_for(lambda: "waiting for version 0" in log.read_text(), log)
        run.publish()
        first = wait_for(lambda: record("ready", 0), log)
        assert (first.island_id, first.pid, first.versions_verified) == ("east", island.pid, 1)
        for _ in range(3):
            run.publish()
        wait_for(lambda: record("ready", 3), log)
        with httpx.Client(base_url=first.url, timeout=60) as client:
            body = {"text": "1+1=", "sampling_params": {"n": 2, "max_new_tokens": 6, "seeds": [1, 2]}}
            once, again = (client.post("/generate", json=body).json() for _ in range(2))
            assert once == again
            assert once["weight_version_end"] == 3
            info = client.get("/server_info").json()
            assert (info["versions_verified"], info["engine"]["kind"]) == (4, "torch")
            # A long generation is under way when the island is told to stop: it is finished, new ones are not begun.
            long = {"text": "1", "sampling_params": {"max_new_tokens": 3000, "temperature": 0}}
            with socket.create_connection(("127.0.0.1", int(first.url.rsplit(":", 1)[1]))) as raw:
                data = json.dumps(long).encode()
                raw.sendall(
                    b"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "
                    + str(len(data)).encode()
                    + b"\r\n\r\n"
                    + data
                )
                wait_for(lambda: client.get("/server_info").json()["active_requests"] == 1, log)
                island.send_signal(signal.SIGTERM)
                wait_for(lambda: record("draining", 3), log)
                assert client.post("/generate", json=body).status_code == 503
                raw.settimeout(60)
                answer = b""
                while chunk := raw.recv(1 << 16):
                    answer += chunk
        assert answer.startswith(b"HTTP/1.1 200")
        assert island.wait(30) == 0
    assert run.ledger.islands() == []


@pytest.mark.slow
def test_an_island_ends_with_the_process_that_started_it(run: DiskRun, tmp_path: Path) -> None:
    run.publish()
    log = tmp_path / "log"
    argv = command(run, "--exit-with-parent")
    starter = f"import subprocess, sys, time; print(subprocess.Popen({argv!r}).pid, flush=True); time.sleep(600)"
    with log.open("wb") as out:
        parent = subprocess.Popen(
            [sys.executable, "-c", starter], stdout=subprocess.PIPE, stderr=out, env=environment()
        )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        wait_for(lambda: [r for r in run.ledger.islands() if r.state == "ready"], log)
        parent.kill()
        parent.wait()
        wait_for(lambda: run.ledger.islands() == [], log, limit_s=20)
        wait_for(lambda: not Path(f"/proc/{pid}").exists() or "Z" in _state(pid), log, limit_s=20)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]
    except OSError:
        return "Z"


@pytest.mark.slow
def test_an_island_that_cannot_vouch_for_its_weights_leaves(run: DiskRun, tmp_path: Path) -> None:
    run.publish()
    run.publish(surprise=torch.ones(3, dtype=torch.bfloat16))  # what the model has no place for
    log = tmp_path / "log"
    with process(command(run, "--island-id", "west", "--follow", "demand"), log) as island:
        ready = wait_for(lambda: [r for r in run.ledger.islands() if r.state == "ready"], log)[0]
        with httpx.Client(base_url=ready.url, timeout=60) as client:

            def ask(**policy: int) -> int:
                return client.post("/generate", json={"text": "1", "weight_version": policy}).status_code

            assert ask(exact_version=0) == 200
            assert ask(min_version=1) == 503
            assert client.get("/health").status_code == 503
            assert client.get("/server_info").json()["sync_state"] == "ERROR"
            assert ask() == 503
        assert island.wait(30) == 3
    (left,) = run.ledger.islands()
    assert (left.state, left.versions_applied, left.versions_verified) == ("failed", 1, 1)
    assert "version 1" in (left.last_error or "")


@pytest.mark.slow
def test_a_version_that_is_not_what_its_manifest_says_is_never_touched(run: DiskRun, tmp_path: Path) -> None:
    run.publish()
    run.publish()
    key = keys.manifest(RUN, 1)
    manifest = json.loads(run.store.get(key))
    run.store.put(key, json.dumps({**manifest, "root_digest": "0" * 64}).encode())
    log = tmp_path / "log"
    with process(command(run, "--island-id", "west", "--follow", "demand", "--max-wait", "3"), log):
        ready = wait_for(lambda: [r for r in run.ledger.islands() if r.state == "ready"], log)[0]
        with httpx.Client(base_url=ready.url, timeout=60) as client:

            def ask(**policy: int) -> int:
                return client.post("/generate", json={"text": "1", "weight_version": policy}).status_code

            assert ask(exact_version=0) == 200
            assert ask(min_version=1) == 409
            wait_for(lambda: "root digest " + "0" * 64 in (run.ledger.islands()[0].last_error or ""), log)
            assert ask(exact_version=0) == 200


@pytest.mark.slow
def test_a_taken_port_is_one_clear_line(run: DiskRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            command(run, "--port", port, kind="sidecar"), capture_output=True, text=True, env=environment(), timeout=60
        )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"sprawl: port {port} on 127.0.0.1 is taken (choose another with --port, or --port 0 for any free one)"
    ]


def settings(**changes: Any) -> IslandSettings:
    return IslandSettings(board="runs", run_id=None, **changes)


def test_nothing_listens_outside_loopback_without_a_token() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.7", "example.org"):
        assert not is_loopback(host)
        with pytest.raises(SprawlError, match="SPRAWL_TOKEN"):
            bind(settings(host=host))
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert is_loopback(host)


def test_where_others_reach_it() -> None:
    with pytest.raises(SprawlError, match="--advertise-url"):
        bind(settings(host="0.0.0.0", token="t"))
    with pytest.raises(SprawlError, match="does not resolve"):
        bind(settings(host="no-such-host.invalid", token="t"))
    with bind(settings()) as listener:
        port = listener.getsockname()[1]
        assert base_url(settings(), listener) == f"http://127.0.0.1:{port}"
        assert base_url(settings(tls_cert="c.pem"), listener) == f"https://127.0.0.1:{port}"
        assert base_url(settings(advertise_url="https://east.example/"), listener) == "https://east.example"
        with pytest.raises(SprawlError, match=f"port {port} on 127.0.0.1 is taken"):
            bind(settings(port=port))
