"""The board on a real S3 server. Needs the `s3` extra and SeaweedFS's `weed` on PATH; skipped otherwise."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sprawl.board import keys, remote
from sprawl.board.reader import VersionReader
from sprawl.board.retention import gc
from sprawl.board.store import MissingKey, Store, open_store
from sprawl.board.verify import verify_board
from sprawl.errors import BoardError
from tests.board.faulty_server import Faults, in_front_of
from tests.board.seaweed import running
from tests.board.states import FILES, RUN, publish, publisher, state_of

pytestmark = pytest.mark.slow
TRIES = 4


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


@pytest.fixture
def faulty(endpoint: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, Faults]]:
    """The same board through a server that fails, and nobody waits long."""
    with in_front_of(endpoint) as (url, faults):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setattr(remote, "_PAUSES_S", (0.01,) * TRIES)
        monkeypatch.setitem(remote._OPTIONS["s3"]["config_kwargs"], "retries", {"total_max_attempts": 1})  # the SDK's
        yield open_store(store.url), faults


@pytest.mark.parametrize("status", [500, 503])
@pytest.mark.parametrize("action", ["get", "put", "create", "exists", "list", "children", "delete"])
def test_a_store_that_fails_for_a_while_is_asked_again(faulty: tuple[Store, Faults], action: str, status: int) -> None:
    store, faults = faulty
    store.put("r/a", b"1")
    actions: dict[str, Callable[[], object]] = {
        "get": lambda: store.get("r/a") == b"1",
        "put": lambda: [store.put("r/b", b"2"), store.get("r/b")] == [None, b"2"],
        "create": lambda: store.create("r/c", b"3") and store.get("r/c") == b"3",
        "exists": lambda: store.exists("r/a") and not store.exists("r/none"),
        "list": lambda: store.list("r/") == ["r/a"],
        "children": lambda: store.children("r/") == ["a"],
        "delete": lambda: [store.delete("r/a"), store.exists("r/a")] == [None, False],
    }
    faults.left, faults.status = TRIES, status
    assert actions[action]()
    assert (faults.left, faults.answered) == (0, TRIES)


def test_it_is_asked_for_longer_than_the_sdk_asks(endpoint: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("r/a", b"1")
    with in_front_of(endpoint) as (url, faults):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        through = open_store(store.url)
        faults.left = 5  # the SDK makes three tries
        assert through.get("r/a") == b"1"


def test_a_create_whose_reply_was_lost_is_won(faulty: tuple[Store, Faults]) -> None:
    store, faults = faulty
    faults.left, faults.after = TRIES, True
    assert store.create("r/a", b"mine")
    assert faults.left == 0
    faults.left = TRIES
    assert not store.create("r/a", b"another's")


def test_a_store_that_goes_on_failing_is_named(faulty: tuple[Store, Faults]) -> None:
    store, faults = faulty
    faults.left = 1000
    with pytest.raises(BoardError, match=r"cannot read r/a.*[Ii]nternal"):
        store.get("r/a")


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
