"""A real mirror process: what it answers, how it registers, how it ends."""

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from sprawl.board import keys
from sprawl.board.store import Store
from sprawl.mirror.objects import ROUTE
from sprawl.mirror.registry import mirrors
from tests.board.states import RUN, publish
from tests.mirror.support import command, environment, metric, put_blob, running

pytestmark = pytest.mark.slow


def test_what_it_answers(place: str, board: Store, tmp_path: Path) -> None:
    publish(board, 2)
    big = put_blob(board, RUN, 9, bytes(range(256)) * 20_000)
    with running(place, tmp_path / "cache", "--region", "east") as (process, record):
        assert (record.region, record.pid) == ("east", process.pid)
        with httpx.Client(base_url=record.url) as client:

            def get(key: str, method: str = "GET", **headers: str) -> httpx.Response:
                return client.request(method, f"{ROUTE}{key}", headers=headers)

            assert get(keys.manifest(RUN, 1)).content == board.get(keys.manifest(RUN, 1))
            assert get(big).content == board.get(big)
            head = get(big, "HEAD")
            assert (head.status_code, head.content, head.headers["Content-Length"]) == (200, b"", "5120000")
            assert head.headers["ETag"] == f'"{big.rpartition("/")[2]}"'
            assert get(keys.manifest(RUN, 2)).status_code == 404
            assert get(keys.manifest(RUN, 2), Prefer="wait=0.3").elapsed.total_seconds() > 0.3
            assert get(f"{RUN}/blobs/9/{'0' * 64}").status_code == 404
            for private in (keys.run(RUN), keys.latest(RUN), keys.epoch(RUN, 1), ".mirrors/east/a.json"):
                assert get(private).status_code == 403, private
            assert get(big, "PUT").status_code == 405
            assert client.get("/").status_code == 404
            assert client.get("/health").json() == {"ready": True, "board_error": None}
            assert metric(record.url, "board_bytes_total") == 5_120_000 + len(board.get(keys.manifest(RUN, 1)))
            assert metric(record.url, "cache_blobs") == 1
        assert board.children("") == [RUN]  # the registry is in nobody's way
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert mirrors(board) == []


def test_a_thousand_connections_cost_one_fetch(place: str, board: Store, tmp_path: Path) -> None:
    key = put_blob(board, RUN, 0, b"delta" * 1000)

    async def ask(url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        request = f"GET {ROUTE}{key} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()

        async def one() -> bool:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request)
            answer = await reader.read()
            writer.close()
            return answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"delta" * 1000)

        assert all(await asyncio.gather(*(one() for _ in range(1000))))

    with running(place, tmp_path / "cache") as (_, record):
        asyncio.run(asyncio.wait_for(ask(record.url), 60))
        assert metric(record.url, "board_requests_total") == 1
        assert metric(record.url, "sent_bytes_total") == 5_000_000


def test_it_needs_its_own_token(place: str, board: Store, tmp_path: Path) -> None:
    publish(board, 1)
    with running(place, tmp_path / "cache", SPRAWL_MIRROR_TOKEN="secret", SPRAWL_TOKEN="islands") as (_, record):
        url = f"{record.url}{ROUTE}{keys.manifest(RUN, 0)}"
        for wrong in ({}, {"Authorization": "Bearer islands"}, {"Authorization": "secret"}):
            assert httpx.get(url, headers=wrong).status_code == 401
        assert httpx.get(f"{record.url}/metrics").status_code == 401
        assert httpx.get(f"{record.url}/health").status_code == 200
        assert httpx.get(url, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_restart_serves_what_is_on_disk(place: str, board: Store, tmp_path: Path) -> None:
    keep, lose = (put_blob(board, RUN, 0, data * 1000) for data in (b"keep", b"lose"))
    cache = tmp_path / "cache"
    with running(place, cache, "--mirror-id", "a") as (process, record):
        for key in (keep, lose):
            httpx.get(f"{record.url}{ROUTE}{key}").raise_for_status()
        process.kill()
        process.wait()
    digest = lose.rpartition("/")[2]
    (cache / digest[:2] / digest).write_bytes(bytes(4000))
    with running(place, cache, "--mirror-id", "a") as (_, record):
        assert httpx.get(f"{record.url}{ROUTE}{keep}").content == b"keep" * 1000
        assert metric(record.url, "board_requests_total") == 0
        assert httpx.get(f"{record.url}{ROUTE}{lose}").content == b"lose" * 1000
        assert metric(record.url, "damaged_total") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--listen", "0.0.0.0:0"), "SPRAWL_MIRROR_TOKEN"),
        (("--listen", "nowhere.invalid:0"), "SPRAWL_MIRROR_TOKEN"),
        (("--listen", "elsewhere"), "write HOST:PORT"),
        (("--region", "a/b"), "--region 'a/b' is not a name"),
        (("--cache-size", "lots"), "--cache-size 'lots' is no size"),
        (("--tls-cert", __file__), "--tls-cert and --tls-key belong together"),
        (("--cache", __file__), "Directory"),
    ],
)
def test_wrong_starts(place: str, board: Store, tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    argv = command(place, tmp_path / "cache", *options)
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_no_board_and_no_second_mirror_on_a_cache(place: str, board: Store, tmp_path: Path) -> None:
    def start(*arguments: str) -> str:
        done = subprocess.run(arguments, capture_output=True, text=True, env=environment(), timeout=60)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        return done.stderr

    assert "no board at" in start(*command(str(tmp_path / "none"), tmp_path / "cache"))
    with running(place, tmp_path / "cache"):
        assert "belongs to a running mirror" in start(*command(place, tmp_path / "cache"))


def test_a_slow_talker_and_idle_connections_are_in_nobodys_way(place: str, board: Store, tmp_path: Path) -> None:
    key = put_blob(board, RUN, 0, b"x" * 1000)

    async def work(url: str) -> float:
        host, port = url.removeprefix("http://").split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(500)]
        for _, writer in idle:
            writer.write(b"GET /v1/ob")
        started = time.monotonic()
        async with httpx.AsyncClient() as client:
            (await client.get(f"{url}{ROUTE}{key}")).raise_for_status()
        elapsed = time.monotonic() - started
        for _, writer in idle:
            writer.close()
        return elapsed

    with running(place, tmp_path / "cache") as (_, record):
        assert asyncio.run(asyncio.wait_for(work(record.url), 60)) < 5
