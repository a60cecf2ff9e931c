"""The board on a real S3 server. Needs the `s3` extra and SeaweedFS's `weed` on PATH; skipped otherwise."""

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
from tests.board.seaweed import running
from tests.board.states import FILES, RUN, publish, publisher, state_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("seaweed"), "boards") as url:
        yield url


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
