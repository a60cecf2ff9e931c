"""The reading-only HTTP server: what it takes for a request, and what it does with everything else."""

import asyncio
import socket
from pathlib import Path

import pytest

from sprawl.mirror import http
from sprawl.mirror.http import Answer, HttpServer, Malformed, Request, parse


def test_a_request() -> None:
    request = parse(b"GET /v1/objects/a%20b?x=1 HTTP/1.1\r\nHost: x\r\nPrefer:  wait=3 \r\n\r\n")
    assert request == Request("GET", "/v1/objects/a b", {"host": "x", "prefer": "wait=3"}, True)
    assert not parse(b"GET / HTTP/1.0\r\n\r\n").keep_alive
    assert not parse(b"GET / HTTP/1.1\r\nConnection: Close\r\n\r\n").keep_alive
    assert parse(b"GET / HTTP/1.1\r\nContent-Length: 0\r\n\r\n").method == "GET"


@pytest.mark.parametrize(
    "head",
    [
        b"\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"GET http://x/ HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 3\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nnonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
    ],
)
def test_what_is_none(head: bytes) -> None:
    with pytest.raises(Malformed):
        parse(head)


def talk(data: bytes, tmp_path: Path, *, connections: int = 10, limit: int = 10) -> list[bytes]:
    """What each of some connections that all send `data` gets back until it is closed."""
    big = tmp_path / "big"
    big.write_bytes(bytes(range(256)) * 4096)

    async def answer(request: Request) -> Answer:
        if request.path == "/big":
            return Answer(200, file=big.open("rb"), size=1 << 20)
        if request.path == "/fails":
            raise RuntimeError("as it happens")
        return Answer(200, request.path.encode())

    async def one(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        got = await reader.read(-1)
        writer.close()
        return got

    async def work() -> list[bytes]:
        server = HttpServer(answer, limit)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.start(listener, None)
        try:
            return await asyncio.gather(*(one(listener.getsockname()[1]) for _ in range(connections)))
        finally:
            await server.stop(1.0)

    return asyncio.run(asyncio.wait_for(work(), 20))


def test_several_requests_on_a_connection(tmp_path: Path) -> None:
    last = b"GET /c HTTP/1.1\r\nConnection: close\r\n\r\n"
    for got in talk(b"GET /a HTTP/1.1\r\n\r\nHEAD /big HTTP/1.1\r\n\r\nGET /big HTTP/1.1\r\n\r\n" + last, tmp_path):
        assert got.count(b"HTTP/1.1 200 OK\r\n") == 4
        assert got.endswith(b"\r\n\r\n/c")
        assert bytes(range(256)) * 4096 in got
        assert len(got) < (1 << 20) + 1000  # the HEAD brought no body


def test_nonsense_ends_the_connection(tmp_path: Path) -> None:
    (got,) = talk(b"BREW / HTCPCP/1.0\r\n\r\nGET /a HTTP/1.1\r\n\r\n", tmp_path, connections=1)
    assert got.startswith(b"HTTP/1.1 400 Bad Request")
    assert b"/a" not in got
    (got,) = talk(b"GET /" + b"a" * 20_000, tmp_path, connections=1)
    assert got == b""
    (got,) = talk(b"GET /fails HTTP/1.1\r\n\r\n", tmp_path, connections=1)
    assert got == b""


def test_connections_are_bounded_and_do_not_stay_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_S", 0.5)
    answers = talk(b"GET /a HTTP/1.1\r\n\r\nGET /unfinished", tmp_path, connections=8, limit=5)
    assert sum(got.startswith(b"HTTP/1.1 200") for got in answers) == 5
    assert sum(got.startswith(b"HTTP/1.1 503") for got in answers) == 3
