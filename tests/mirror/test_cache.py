"""Blobs on disk: bounded, least recently used out first, and never wrong."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from sprawl.errors import SprawlError
from sprawl.mirror.cache import DiskCache


def blob(number: int, size: int = 1000) -> tuple[str, bytes]:
    data = bytes([number]) * size
    return blake3(data).hexdigest(), data


def read(cache: DiskCache, digest: str, *, suspect: bool = False) -> bytes | None:
    held = cache.open(digest, suspect=suspect)
    if held is None:
        return None
    with held[0] as file:
        data = file.read()
    assert len(data) == held[1]
    return data


def on_disk(directory: Path) -> int:
    total = 0
    for path in directory.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # renamed or evicted meanwhile
            total += path.stat().st_size
    return total


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 3500)
    blobs = [blob(number) for number in range(4)]
    for digest, data in blobs[:3]:
        cache.put(digest, data)
    assert read(cache, blobs[0][0]) == blobs[0][1]
    cache.put(*blobs[3])
    assert [read(cache, digest) is not None for digest, _ in blobs] == [True, False, True, True]
    assert (cache.used, cache.evicted, on_disk(tmp_path)) == (3000, 1, 3000)
    with pytest.raises(ValueError, match="exceed"):
        cache.put(*blob(9, 4000))
    assert len(cache) == 3


def test_the_bound_holds_while_many_write(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 10_000)
    seen = []

    def put(number: int) -> None:
        cache.put(*blob(number))
        seen.append(on_disk(tmp_path))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(60)))
    assert max(seen) <= 10_000
    assert cache.used == on_disk(tmp_path) <= 10_000


def test_an_evicted_blob_is_read_to_its_end(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1500)
    digest, data = blob(1)
    cache.put(digest, data)
    held = cache.open(digest)
    assert held is not None
    cache.put(*blob(2))
    assert digest not in cache
    with held[0] as file:
        assert file.read() == data


def test_a_restart_takes_over_and_checks(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 10_000)
    good, bad = blob(1), blob(2)
    for one in (good, bad):
        cache.put(*one)
    cache.close()
    path = tmp_path / bad[0][:2] / bad[0]
    path.write_bytes(b"\0" * 1000)  # what a crash may leave: right size, zeros
    (path.parent / ".tmp-123").write_bytes(b"half")

    again = DiskCache(tmp_path, 10_000)
    assert len(again) == 2
    assert read(again, good[0]) == good[1]
    assert read(again, bad[0]) is None
    assert (again.damaged, bad[0] in again, path.exists()) == (1, False, False)
    assert list(tmp_path.glob("*/.tmp-*")) == []
    again.close()
    assert DiskCache(tmp_path, 500).used == 0


def test_damage_under_our_feet(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 10_000)
    digest, data = blob(1)
    path = tmp_path / digest[:2] / digest

    cache.put(digest, data)
    path.write_bytes(data[:-1])
    assert read(cache, digest) is None  # its size and times changed: noticed

    cache.put(digest, data)
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as when the disk forgets
    assert read(cache, digest) != data
    assert read(cache, digest, suspect=True) is None
    assert cache.damaged == 2

    cache.put(digest, data)
    path.unlink()
    assert read(cache, digest) is None
    assert digest not in cache


def test_a_directory_has_one_mirror(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", 1000)
    with pytest.raises(SprawlError, match="belongs to a running mirror"):
        DiskCache(tmp_path / "cache", 1000)
    cache.close()
    DiskCache(tmp_path / "cache", 1000).close()
    (tmp_path / "file").write_text("x")
    with pytest.raises(SprawlError, match="cannot be used"):
        DiskCache(tmp_path / "file", 1000)
