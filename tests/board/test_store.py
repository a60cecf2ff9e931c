import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from sprawl.board.local import LocalStore
from sprawl.board.remote import RemoteStore
from sprawl.board.store import MemoryStore, MissingKey, Store, open_store, probe_exclusive_create
from sprawl.board.verify import verify_board
from sprawl.errors import BoardError, SprawlError
from tests.board.states import RUN, publish


def test_put_get_list_delete(store: Store) -> None:
    store.put("r/a/2", b"two")
    store.put("r/a/1", b"one")
    store.put("r/b", b"b")
    store.put("r/a/1", b"ONE")
    assert store.get("r/a/1") == b"ONE"
    assert store.list("r/a/") == ["r/a/1", "r/a/2"]
    assert store.list("r/") == ["r/a/1", "r/a/2", "r/b"]
    assert store.list("r/a/1") == ["r/a/1"]
    assert store.list("none/") == []
    assert store.children("") == ["r"]
    assert store.children("r/") == ["a", "b"]
    assert store.children("none/") == []
    assert store.exists("r/b")
    assert not store.exists("r/a"), "a folder is not an object"
    store.delete("r/b")
    store.delete("r/b")
    assert not store.exists("r/b")
    with pytest.raises(MissingKey, match="r/b"):
        store.get("r/b")
    with pytest.raises(MissingKey):
        store.get("r/a")


def test_missing_key_is_both_a_key_error_and_a_one_line_user_error() -> None:
    with pytest.raises(KeyError) as caught:
        MemoryStore("m").get("k")
    assert isinstance(caught.value, SprawlError)
    assert str(caught.value) == "no object k on board memory://m"


def test_create_is_exclusive_and_forgives_a_lost_reply(store: Store) -> None:
    assert store.create("x/k", b"mine")
    assert store.create("x/k", b"mine"), "the same bytes: our own write came through"
    assert not store.create("x/k", b"other")
    assert store.get("x/k") == b"mine"


def test_racing_creates_have_one_winner(store: Store) -> None:
    for round_ in range(20):
        barrier = threading.Barrier(8)

        def attempt(i: int, key: str = f"race/{round_}", barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            return store.create(key, b"%d" % i)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(attempt, range(8)))
        assert sum(won) == 1
        assert store.get(f"race/{round_}") == b"%d" % won.index(True)


def test_readers_never_see_a_partial_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    payloads = [bytes([i]) * 300_000 for i in range(2)]
    store.put("k", payloads[0])
    done = threading.Event()

    def write() -> None:
        for i in range(60):
            store.put("k", payloads[i % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set():
        assert store.get("k") in payloads
        reads += 1
    writer.join()
    assert reads > 10


def test_temporaries_are_hidden_and_swept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("r/blobs/1/x", b"x")
    left = tmp_path / "r/blobs/1/.tmp-1-abc"
    left.write_bytes(b"half")
    assert store.list("") == ["r/blobs/1/x"]
    assert store.children("r/blobs/1/") == ["x"]
    assert store.sweep("r/", 3600) == 0, "a living writer may own it"
    os.utime(left, (0, 0))
    assert store.sweep("r/", 3600) == 1
    assert store.get("r/blobs/1/x") == b"x"


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", "a//b", "."])
def test_keys_cannot_leave_the_board(tmp_path: Path, key: str) -> None:
    with pytest.raises(BoardError, match="valid board key"):
        LocalStore(tmp_path / "board").put(key, b"")


def test_open_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BoardError, match="does not exist"):
        open_store(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists(), "a typo must not become a directory"
    made = open_store(f"file://{tmp_path}/made", create=True, probe=True)
    made.put("k", b"v")
    assert open_store(str(tmp_path / "made")).get("k") == b"v"
    monkeypatch.chdir(tmp_path)
    assert open_store("made").get("k") == b"v"
    (tmp_path / "file").write_text("")
    with pytest.raises(BoardError, match="is a file"):
        open_store(str(tmp_path / "file"))
    with pytest.raises(BoardError, match="empty"):
        open_store("")
    with pytest.raises(BoardError, match="nosuch"):
        open_store("nosuch://bucket/x")
    open_store("memory://shared").put("k", b"v")
    assert open_store("memory://shared").get("k") == b"v"


def test_unwritable_board_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("in the way")
    with pytest.raises(BoardError, match="r/k"):
        LocalStore(tmp_path).put("r/k", b"")


def test_probe_refuses_a_backend_without_exclusive_create(store: Store) -> None:
    probe_exclusive_create(store)
    assert store.list("") == []

    class Overwrites(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            self.put(key, data)
            return True

    with pytest.raises(BoardError, match="second writer"):
        probe_exclusive_create(Overwrites("bad"))


def remote(filesystem: fsspec.AbstractFileSystem) -> RemoteStore:
    return RemoteStore(filesystem, f"/{uuid.uuid4().hex}/board", "fake://board")


def test_a_backend_that_reports_conflicts_as_existing_files() -> None:
    """As gcsfs and adlfs do. fsspec's in-memory file system stands in for them: those two were not run."""
    store = remote(fsspec.filesystem("memory"))
    probe_exclusive_create(store)
    assert store.create("r/k", b"mine")
    assert store.create("r/k", b"mine"), "our own write, its reply was lost"
    assert not store.create("r/k", b"other")
    assert store.get("r/k") == b"mine"
    store.put("r/k", b"changed")
    assert store.list("r/") == ["r/k"]
    assert store.children("") == ["r"]
    store.delete("r/k")
    with pytest.raises(MissingKey):
        store.get("r/k")
    publish(store, 6)
    assert verify_board(store, RUN).ok


def test_a_backend_that_ignores_exclusive_create_is_refused() -> None:
    class Ignores(MemoryFileSystem):
        protocol = "ignores"

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: object) -> None:
            super().pipe_file(path, value, mode="overwrite", **options)

    with pytest.raises(BoardError, match="second writer"):
        probe_exclusive_create(remote(Ignores()))


@pytest.mark.parametrize("address", ["s3://key:hush@bucket/runs", "gs://u:hush@b", "sftp://me:hush@host/runs"])
def test_a_password_in_an_address_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(BoardError, match=r"carries a password.*environment") as refused:
        open_store(address)
    assert "hush" not in str(refused.value)
