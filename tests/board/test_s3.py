"""The board on a real S3 server. Needs the `s3` extra and SeaweedFS's `weed` on PATH; skipped otherwise."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sprawl.board import keys
from sprawl.board.reader import VersionReader
from sprawl.board.retention import gc
from sprawl.board.store import MissingKey, Store, open_store
from sprawl.board.verify import verify_board
from sprawl.errors import BoardError
from tests.board.states import FILES, RUN, publish, publisher, state_of

pytestmark = pytest.mark.slow
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


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    s3fs = pytest.importorskip("s3fs")
    weed = shutil.which("weed")
    if weed is None:
        pytest.skip("no `weed` on PATH")
    folder = tmp_path_factory.mktemp("seaweed")
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
                    s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False).mkdir("boards")
                    break
                except Exception:
                    time.sleep(0.5)
            else:
                pytest.fail("the S3 server did not start")
            yield url
        finally:
            server.terminate()
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@pytest.fixture
def store(endpoint: str, request: pytest.FixtureRequest) -> Store:
    return open_store(f"s3://boards/{request.node.name}", create=True, probe=True)


def test_objects(store: Store) -> None:
    assert store.list("") == []
    store.put("r/a/1", b"1")
    store.put("r/a/2", b"2")
    store.put("r/b", b"")
    assert store.get("r/a/2") == b"2"
    store.put("r/a/2", b"a longer two")
    assert store.get("r/a/2") == b"a longer two"
    assert store.list("r/") == ["r/a/1", "r/a/2", "r/b"]
    assert store.children("") == ["r"]
    assert store.children("r/") == ["a", "b"]
    assert store.children("none/") == []
    assert store.list("none/") == []
    assert store.exists("r/b")
    assert not store.exists("r/a")
    store.delete("r/b")
    store.delete("r/b")
    assert not store.exists("r/b")
    with pytest.raises(MissingKey):
        store.get("r/b")


def test_one_winner(store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda i: store.create("k", b"%d" % i), range(4)))
    assert sum(won) == 1
    assert store.get("k") == b"%d" % won.index(True)
    assert store.create("k", store.get("k"))


def test_versions_and_retention(store: Store) -> None:
    publish(store, 6)
    reader = VersionReader(store, RUN)
    assert reader.head() == 5
    assert reader.files() == FILES
    served = reader.materialise(1)
    reader.advance(served, 5)
    assert verify_board(store, RUN).ok
    gc(store, RUN, 1)
    assert reader.versions() == [4, 5]
    assert verify_board(store, RUN).ok
    assert publisher(store).publish(5, 5, state_of(5)).already_committed
    assert store.list(keys.blobs(RUN, 1)) == []


def test_trouble_is_named(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BoardError, match="bucket does not exist"):
        open_store("s3://no-such-bucket/x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(BoardError, match="credentials"):
        open_store("s3://boards/wrong-secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(BoardError, match=r"127\.0\.0\.1:9"):
        open_store("s3://boards/dead-endpoint")
    assert time.monotonic() - started < 20
