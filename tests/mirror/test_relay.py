"""One fetch an object, one look a version, whoever asks and however many do."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from blake3 import blake3

from sprawl.board import keys
from sprawl.errors import BoardError
from sprawl.mirror.cache import DiskCache
from sprawl.mirror.objects import BlobKey, ManifestKey, parse
from sprawl.mirror.relay import MAX_WATCHED, Relay, StillFetching, Unavailable
from tests.mirror.support import Counting, put_blob

T = TypeVar("T")
RUN = "run-1"


def go(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


def relay_of(board: Counting, tmp_path: Path, *, limit: int = 1 << 20, poll_s: float = 0.05) -> Relay:
    return Relay(board, DiskCache(tmp_path / "cache", limit), poll_s=poll_s)


def blob_key(board: Counting, data: bytes, version: int = 1) -> BlobKey:
    found = parse(put_blob(board, RUN, version, data))
    assert isinstance(found, BlobKey)
    return found


def manifest_key(version: int) -> ManifestKey:
    return ManifestKey(keys.manifest(RUN, version), RUN, version)


async def read(relay: Relay, key: BlobKey, wait_s: float = 5, **more: bool) -> bytes | None:
    held = await relay.blob(key, wait_s, **more)
    if held is None:
        return None
    with held[0] as file:
        return file.read()


def test_a_thousand_readers_cost_one_fetch(tmp_path: Path) -> None:
    async def work() -> None:
        board = Counting(delay_s=0.2)
        key = blob_key(board, b"delta" * 100)
        relay = relay_of(board, tmp_path)
        answers = await asyncio.gather(*(read(relay, key) for _ in range(1000)))
        assert set(answers) == {b"delta" * 100}
        assert board.reads == {key.key: 1}
        assert (relay.totals.board_requests, relay.totals.board_bytes) == (1, 500)

    go(work())


def test_a_reader_that_leaves_stops_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        board = Counting(delay_s=0.3)
        key = blob_key(board, b"x")
        relay = relay_of(board, tmp_path)
        leaving = asyncio.ensure_future(read(relay, key))
        await asyncio.sleep(0.1)
        leaving.cancel()
        assert await read(relay, key) == b"x"
        with pytest.raises(StillFetching):
            await read(relay, blob_key(board, b"y"), wait_s=0.05)
        assert board.reads.total() == 2

    go(work())


def test_what_is_not_there_is_asked_for_once_in_a_while(tmp_path: Path) -> None:
    async def work() -> None:
        board = Counting()
        relay = relay_of(board, tmp_path, poll_s=0.3)
        missing = BlobKey(keys.blob(RUN, 1, "0" * 64), "0" * 64)
        for _ in range(20):
            assert await read(relay, missing) is None
            assert await relay.manifest(manifest_key(0), 0) is None
        assert board.reads == {missing.key: 1, manifest_key(0).key: 1}
        board.put(manifest_key(0).key, b"{}")
        await asyncio.sleep(0.35)
        assert await relay.manifest(manifest_key(0), 0) == b"{}"
        for _ in range(20):
            assert await relay.manifest(manifest_key(0), 0) == b"{}"
        assert board.reads[manifest_key(0).key] == 2

    go(work())


def test_a_thousand_wait_for_a_version_and_one_looks(tmp_path: Path) -> None:
    async def work() -> None:
        board = Counting()
        relay = relay_of(board, tmp_path, poll_s=0.05)
        waiting = [asyncio.ensure_future(relay.manifest(manifest_key(3), 10)) for _ in range(1000)]
        await asyncio.sleep(0.5)
        assert relay.totals.waiting == 1000
        board.put(manifest_key(3).key, b'{"v": 3}')
        started = time.monotonic()
        assert set(await asyncio.gather(*waiting)) == {b'{"v": 3}'}
        assert time.monotonic() - started < 1
        assert 2 <= board.reads[manifest_key(3).key] <= 13
        assert relay.totals.waiting == 0
        # Nobody waits any more for another: the board is left alone.
        assert await relay.manifest(manifest_key(4), 0.12) is None
        await asyncio.sleep(0.15)
        quiet = board.reads[manifest_key(4).key]
        await asyncio.sleep(0.3)
        assert board.reads[manifest_key(4).key] == quiet
        assert not relay._watching
        assert not relay._waiters

    go(work())


def test_absence_is_claimed_only_when_it_was_seen(tmp_path: Path) -> None:
    async def work() -> None:
        board = Counting()
        relay = relay_of(board, tmp_path)
        waiting = asyncio.ensure_future(relay.manifest(manifest_key(0), 10))
        await asyncio.sleep(0.1)
        board.error = BoardError("the board is on fire")
        with pytest.raises(Unavailable, match="on fire"):
            await waiting
        with pytest.raises(Unavailable):
            await relay.manifest(manifest_key(1), 0)
        key = blob_key(board, b"x")
        for _ in range(20):
            with pytest.raises(Unavailable, match="on fire"):
                await read(relay, key)
        assert board.reads[key.key] == 1
        assert relay.board_error == "the board is on fire"

    go(work())


def test_damage_on_the_board_is_not_relayed(tmp_path: Path) -> None:
    async def work() -> None:
        board = Counting()
        key = BlobKey(keys.blob(RUN, 1, blake3(b"right").hexdigest()), blake3(b"right").hexdigest())
        board.put(key.key, b"wrong")
        relay = relay_of(board, tmp_path)
        with pytest.raises(Unavailable, match="damaged on the board"):
            await read(relay, key)
        assert len(relay.cache) == 0

    go(work())


def test_what_does_not_fit_is_fetched_once(tmp_path: Path) -> None:
    async def work() -> None:
        board = Counting()
        relay = relay_of(board, tmp_path, limit=100)
        key = blob_key(board, b"x" * 200)
        for _ in range(5):
            with pytest.raises(Unavailable, match="exceed the cache"):
                await read(relay, key)
        assert board.reads[key.key] == 1

    go(work())


def test_a_suspect_blob_is_checked_and_fetched_again(tmp_path: Path) -> None:
    async def work() -> None:
        board = Counting()
        relay = relay_of(board, tmp_path)
        key = blob_key(board, b"right")
        assert await read(relay, key) == b"right"
        path = tmp_path / "cache" / key.digest[:2] / key.digest
        path.write_bytes(b"wrong")
        assert await read(relay, key, suspect=True) == b"right"
        assert await read(relay, key, suspect=True) == b"right"
        assert (board.reads[key.key], relay.cache.damaged) == (2, 1)

    go(work())


def test_versions_that_are_waited_for_are_bounded(tmp_path: Path) -> None:
    async def work() -> None:
        board = Counting()
        relay = relay_of(board, tmp_path, poll_s=5)
        waiting = [asyncio.ensure_future(relay.manifest(manifest_key(v), 20)) for v in range(MAX_WATCHED)]
        await asyncio.sleep(0.5)
        started = time.monotonic()
        assert await relay.manifest(manifest_key(9999), 20) is None
        assert time.monotonic() - started < 1
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await relay.close()

    go(work())
