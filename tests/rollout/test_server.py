"""The port against clients that are slow, many, or gone: real sockets, and a real process for the many."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sprawl.cli import main
from sprawl.errors import SprawlError
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.listen import IslandSettings, bind
from sprawl.rollout.server import Limits, within_files
from tests.rollout.processes import DiskRun, command, environment, process, wait_for
from tests.rollout.served import serving
from tests.rollout.support import Stack, TinyRun, go, until

QUICK = Limits(headers_s=1.0, body_s=1.0, linger_s=0.3, write_s=1.0)


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def request_of(body: Any, *, head: str = "") -> bytes:
    data = json.dumps(body).encode()
    lines = f"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{head}Content-Length: {len(data)}\r\n\r\n"
    return lines.encode() + data


async def ask(port: int, body: Any) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of one request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request_of(body))
        answer = await reader.read()
    finally:
        writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, json.loads(rest)


def test_two_hundred_slow_sockets_are_dropped_while_others_are_served() -> None:
    async def trickle(port: int, kind: int) -> bytes:
        """Send a byte now and then, until the server has had enough; returns what it said."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        whole = request_of({"input_ids": [5]})
        at = [3, whole.index(b"Content-Length"), len(whole) - 10, 0][kind]
        try:
            writer.write(whole[:at])
            while not reader.at_eof() and at < len(whole):
                if kind != 3:  # which says nothing at all
                    writer.write(whole[at : at + 1])
                    at += kind == 0
                try:
                    async with asyncio.timeout(0.4):
                        return await reader.read()
                except TimeoutError:
                    continue
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def scenario() -> None:
        stack = Stack(TinyRun().publish(1))
        async with stack, serving(stack, QUICK) as url:
            started = time.monotonic()
            slow = [asyncio.ensure_future(trickle(port_of(url), i % 4)) for i in range(200)]
            await until(lambda: stack.service.connections.open == 200)
            served = 0
            while not all(task.done() for task in slow):
                status, _, answer = await ask(port_of(url), {"input_ids": [5]})
                assert status == 200
                served += 1
                assert answer["samples"]
                await asyncio.sleep(0.01)
            assert time.monotonic() - started < 6
            assert served > 20
            said = Counter(answer[:12] for answer in await asyncio.gather(*slow))
            assert set(said) <= {b"HTTP/1.1 408", b""}
            assert said[b"HTTP/1.1 408"] >= 100
            await until(lambda: stack.service.connections.open == 0)
            assert stack.service.connections.dropped == 200

    go(scenario())


def test_a_client_that_does_not_read_its_stream_is_dropped() -> None:
    async def scenario() -> None:
        stack = Stack(TinyRun().publish(1), FakeEngine(max_length=1 << 20))
        async with stack, serving(stack, QUICK) as url:
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(url), limit=1024)
            body = {"input_ids": [5], "stream": True, "sampling_params": {"n": 4, "max_new_tokens": 60_000}}
            writer.write(request_of(body))
            await until(lambda: stack.service.connections.dropped == 1, 20)
            await until(lambda: stack.gate.active == 0)
            writer.close()
            assert (await ask(port_of(url), {"input_ids": [5]}))[0] == 200

    go(scenario())


def test_a_refused_upload_does_not_hold_the_connection() -> None:
    async def scenario() -> None:
        stack = Stack(TinyRun().publish(1))
        async with stack, serving(stack, QUICK) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
            writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
            try:
                for _ in range(64):
                    writer.write(chunk)
                    await writer.drain()
                    await asyncio.sleep(0.02)
            except ConnectionError:
                pass
            answer = b""
            with suppress(ConnectionError):
                answer = await reader.read()
            assert answer[:12] in (b"HTTP/1.1 413", b"")
            assert stack.service.counters.requests == {("/generate", 413): 1}
            await until(lambda: stack.service.connections.open == 0)

    go(scenario())


def test_connections_above_the_limit_are_answered_at_once() -> None:
    async def scenario() -> None:
        stack = Stack(TinyRun().publish(1))
        async with stack, serving(stack, Limits(connections=3)) as url:
            idle = [await asyncio.open_connection("127.0.0.1", port_of(url)) for _ in range(3)]
            await until(lambda: stack.service.connections.open == 3)
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"Retry-After: 1" in answer
            for each in (writer, *(w for _, w in idle)):
                each.close()
            await until(lambda: stack.service.connections.open == 0)
            assert (await ask(port_of(url), {"input_ids": [5]}))[0] == 200

    go(scenario())


def test_a_kept_connection_serves_again_and_again() -> None:
    async def scenario() -> None:
        stack = Stack(TinyRun().publish(1))
        async with stack, serving(stack, QUICK) as url, httpx.AsyncClient(base_url=url) as client:
            for pause in (0.0, 0.0, 1.5, 0.0):  # longer than any phase may take
                await asyncio.sleep(pause)
                assert (await client.post("/generate", json={"input_ids": [5] * 1000})).status_code == 200
                assert (await client.get("/health")).status_code == 200
            assert stack.service.connections.open == 1
            assert stack.service.connections.dropped == 0

    go(scenario())


def test_fewer_files_mean_fewer_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert within_files(Limits(connections=512)).connections == 512
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def sidecar(run: DiskRun, tmp_path: Path, *options: str) -> Iterator[tuple[int, str]]:
    """Process id and base URL of `sprawl sidecar`."""
    log = tmp_path / "log"
    with process(command(run, "--follow", "eager", *options, kind="sidecar"), log) as started:
        line = wait_for(lambda: [x for x in log.read_text().splitlines() if " at http" in x], log)[0]
        url = line.split(" at ")[1].split()[0]
        wait_for(lambda: _ready(url), log)
        yield started.pid, url
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 0


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", verify=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def run(tmp_path: Path) -> DiskRun:
    run = DiskRun(tmp_path / "runs")
    run.publish()
    return run


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard > 0 else 4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_a_thousand_requests_at_once(run: DiskRun, tmp_path: Path, many_files: None) -> None:
    with sidecar(run, tmp_path, "--max-wait", "2") as (pid, url):
        island = psutil.Process(pid)
        port = port_of(url)
        policies: list[dict[str, int]] = [{}, {"exact_version": 0}, {"max_version": 0}, {"min_version": 5}]

        def body(i: int) -> dict[str, Any]:
            text = "1" * (1 + i % 50)
            return {"text": text, "sampling_params": {"max_new_tokens": 4}, "weight_version": policies[i % 4]}

        async def storm(count: int) -> list[tuple[int, dict[str, str], Any]]:
            return await asyncio.gather(*(ask(port, body(i)) for i in range(count)))

        async def gone() -> None:
            """A hundred clients that hang up without waiting for the answer."""
            for i in range(100):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request_of({**body(i), "sampling_params": {"max_new_tokens": 3000, "temperature": 0}}))
                await writer.drain()
                writer.close()

        asyncio.run(storm(300))  # what a first storm allocates stays allocated
        files, memory = island.num_fds(), island.memory_info().rss
        answers = asyncio.run(storm(1000))
        kinds = Counter(status for status, _, _ in answers)
        assert set(kinds) <= {200, 409, 503}
        assert kinds[200] >= 100
        for i, (status, headers, answer) in enumerate(answers):
            if status == 200:
                assert i % 4 != 3
                assert answer["weight_version_end"] == 0
                assert len(answer["output_ids"]) <= 4
            elif status == 409:
                assert i % 4 == 3
                assert answer["type"] == "WeightVersionNotReady"
            else:
                assert headers["retry-after"] == "1"
                assert answer["error"]["retryable"] is True
        asyncio.run(gone())
        with httpx.Client(base_url=url, timeout=30) as client:
            wait_for(lambda: client.get("/server_info").json()["active_requests"] == 0, tmp_path / "log")
            page = client.get("/metrics").text.splitlines()
            assert "sprawl_held_requests 0" in page
            assert "sprawl_connections 1" in page
            assert client.post("/generate", json=body(0)).status_code == 200
        assert island.num_fds() <= files + 5
        assert island.memory_info().rss < memory + (64 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_socket_frees_the_engine(run: DiskRun, tmp_path: Path, stream: bool) -> None:
    log = tmp_path / "log"
    with sidecar(run, tmp_path) as (_, url), httpx.Client(base_url=url, timeout=30) as client:

        def facts() -> dict[str, Any]:
            return client.get("/server_info").json()

        async def leave() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
            many = {"max_new_tokens": 3000, "temperature": 0}
            writer.write(request_of({"text": "1", "stream": stream, "sampling_params": many}))
            if stream:
                await reader.readuntil(b"data: ")
            else:
                await asyncio.sleep(0.5)
            assert await asyncio.to_thread(lambda: facts()["active_requests"]) == 1
            writer.close()

        asyncio.run(leave())
        wait_for(lambda: facts()["active_requests"] == 0, log, limit_s=3)
        assert facts()["metrics"]["cancelled_requests"] == 1


@pytest.mark.slow
def test_tls_with_a_token(run: DiskRun, tmp_path: Path, certificate: tuple[str, str], monkeypatch: Any) -> None:
    cert, key = certificate
    secret = {**environment(), "SPRAWL_TOKEN": "sesame"}
    monkeypatch.setattr("tests.rollout.processes.environment", lambda: secret)
    with sidecar(run, tmp_path, "--tls-cert", cert, "--tls-key", key) as (_, url):
        assert url.startswith("https://")
        trust = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=url, verify=trust, timeout=30) as client:
            assert client.get("/server_info").status_code == 401
            headers = {"Authorization": "bearer sesame"}
            assert client.get("/server_info", headers=headers).status_code == 200
            answer = client.post("/generate", json={"input_ids": [5]}, headers=headers)
            assert answer.json()["weight_version_end"] == 0


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "island")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert_path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key_path.write_bytes(key.private_bytes(*form))
    return str(cert_path), str(key_path)


def test_a_silent_tls_handshake_ends(certificate: tuple[str, str]) -> None:
    async def scenario() -> None:
        stack = Stack(TinyRun().publish(1))
        async with stack, serving(stack, Limits(handshake_s=0.3), certificate) as url:
            silent = [await asyncio.open_connection("127.0.0.1", port_of(url)) for _ in range(20)]
            trust = ssl.create_default_context(cafile=certificate[0])
            async with httpx.AsyncClient(base_url=url, verify=trust) as client:
                assert (await client.post("/generate", json={"input_ids": [5]})).status_code == 200
            async with asyncio.timeout(5):
                for reader, writer in silent:
                    with suppress(ConnectionError):
                        assert await reader.read() == b""
                    writer.close()

    go(scenario())


def test_what_does_not_fit_together_is_one_line(tmp_path: Path, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    (tmp_path / "empty.pem").write_text("")

    def settings(**more: Any) -> IslandSettings:
        return IslandSettings(board="runs", run_id=None, **more)

    with pytest.raises(SprawlError, match="belong together"):
        bind(settings(tls_cert=cert))
    for wrong in ((key, cert), (cert, str(tmp_path / "empty.pem")), (cert, str(tmp_path / "absent.pem"))):
        with pytest.raises(SprawlError, match="no certificate and its private key") as caught:
            bind(settings(tls_cert=wrong[0], tls_key=wrong[1]))
        assert "\n" not in str(caught.value)
    bind(settings(tls_cert=cert, tls_key=key)).close()
    bind(settings(host="0.0.0.0", insecure=True, registered=False)).close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "x"], "'--port': 'x' is not a valid integer"),
        (["--port", "99999"], "see sprawl sidecar --help"),
        (["--nope"], "--nope"),
        (["--board", "/nonexistent"], "no board at /nonexistent"),
        (["--host", "0.0.0.0"], "set SPRAWL_TOKEN"),
        (["--tls-cert", "cert.pem"], "belong together"),
        (["--tls-cert", "cert.pem", "--tls-key", "key.pem"], "No such file"),
        (["--max-requests", "0"], "--max-requests"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SPRAWL_TOKEN", raising=False)
    monkeypatch.setattr("sys.argv", ["sprawl", "sidecar", *options])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("sprawl: ")
    assert said in err


def test_the_help_shows_how_to_ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["sprawl", "sidecar", "--help"])
    main()
    text = capsys.readouterr().out
    for shown in ("curl", "min_version", "stream", "SPRAWL_TOKEN", "--tls-cert", "extra_body", "/metrics"):
        assert shown in text
