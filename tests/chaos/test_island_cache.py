"""kill -9 of an island at every write to its cache: what it fetches afterwards, and what it serves.

The victim is killed before its n-th write, in the middle of it or inside the patch, for every n; then an island starts
on the same cache. It must come to the published state without fetching a keyframe again.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sprawl.board.local import LocalStore
from sprawl.board.local_copy import JOURNAL, MARK, LocalCopy
from sprawl.board.manifest import DELTA, KEYFRAME
from sprawl.board.merged import merge
from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.delta.files import WEIGHTS
from sprawl.delta.state import state_bytes
from tests.chaos.killing import each_point
from tests.chaos.scenes import EVERY, NEXT, RESHAPED, RUN, follow, play, publish, root, state_of

pytestmark = pytest.mark.slow
SMALL = 4096  # bytes of headers and of sprawl.json


class Counted(LocalStore):
    """A board that remembers which objects were fetched."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fetched: dict[str, int] = {}

    def get(self, key: str) -> bytes:
        data = super().get(key)
        self.fetched[key] = len(data)
        return data

    def bytes_of(self, part: str) -> int:
        return sum(size for key, size in self.fetched.items() if f"/{part}/" in key)


def template(tmp_path: Path, versions: int, run_id: str = RUN) -> Path:
    path = tmp_path / "board"
    for version in range(versions):
        publish(open_store(str(path), create=True), version, run_id)
    return path


def restart(board: Path, folder: Path, version: int, run_id: str = RUN) -> Counted:
    """An island's next life. What it holds afterwards is the published state."""
    store = Counted(board)
    asyncio.run(follow(VersionReader(store, run_id), str(folder), version))
    copy = LocalCopy.open(folder)
    assert copy is not None
    assert (copy.run_id, copy.served.version, copy.served.root) == (run_id, version, root(version))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", WEIGHTS, MARK]
    return store


def places(board: Path, folder: Path, source: Path | None) -> Callable[[int], tuple[str, str]]:
    """An island only reads its board; every kill has its own copy of the cache."""

    def place(point: int) -> tuple[str, str]:
        shutil.rmtree(folder, ignore_errors=True)
        if source is not None:
            shutil.copytree(source, folder)
        return str(board), str(folder)

    return place


def check_room(folder: Path, version: int) -> None:
    """On disk are at most two times the weights, and small change."""
    used = sum(path.stat().st_size for path in folder.iterdir()) if folder.exists() else 0
    assert used <= 2 * state_bytes(state_of(version)) + SMALL


@pytest.mark.parametrize("target", [2, EVERY, RESHAPED, RESHAPED + 1])
def test_a_step_costs_at_most_its_delta_after_a_kill(tmp_path: Path, target: int) -> None:
    """In place, at a keyframe, with a change of form, and after it. Once a step is written down nothing is fetched."""
    board, start, folder = template(tmp_path, target), tmp_path / "start", tmp_path / "folder"
    play("island", str(board), str(start), target - 1)
    publish(open_store(str(board)), target)
    manifest = VersionReader(open_store(str(board)), RUN).require(target)
    seen = set()
    for _ in each_point("island", target, places(board, folder, start)):
        check_room(folder, target)
        seen.add(restart(board, folder, target).bytes_of("blobs"))
    assert seen == {0, manifest.bytes_of(DELTA)}


def test_a_first_keyframe_is_fetched_once(tmp_path: Path) -> None:
    """From the moment on that it is completely on disk."""
    board, folder = template(tmp_path, 2), tmp_path / "folder"
    reader = VersionReader(open_store(str(board)), RUN)
    whole = reader.require(0).bytes_of(KEYFRAME) + reader.require(1).bytes_of(DELTA)
    seen = set()
    for _ in each_point("island", 1, places(board, folder, None)):
        check_room(folder, 1)
        kept = (folder / JOURNAL).exists() or (folder / MARK).exists()
        fetched = restart(board, folder, 1).bytes_of("blobs")
        assert fetched == (0 if kept else whole)
        seen.add(fetched)
    assert seen == {0, whole}


def test_killed_again_while_it_recovers(tmp_path: Path) -> None:
    board, start, folder = template(tmp_path, 2), tmp_path / "start", tmp_path / "folder"
    play("island", str(board), str(start), 1)
    publish(open_store(str(board)), 2)
    half, again, kills = tmp_path / "half", tmp_path / "again", 0
    for _ in each_point("island", 2, places(board, folder, start)):
        if (folder / JOURNAL).exists():
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(folder, half)
            for _ in each_point("island", 2, places(board, again, half)):
                assert restart(board, again, 2).bytes_of("blobs") == 0
                kills += 1
    assert kills > 20


def test_after_a_long_absence_the_merged_delta_is_what_it_costs(tmp_path: Path) -> None:
    board, start, folder = template(tmp_path, 2), tmp_path / "start", tmp_path / "folder"
    play("island", str(board), str(start), 1)
    for version in range(2, 8):
        publish(open_store(str(board)), version)
    record = merge(VersionReader(open_store(str(board)), RUN), 1, 7)
    seen = set()
    for _ in each_point("island", 7, places(board, folder, start)):
        store = restart(board, folder, 7)
        assert store.bytes_of("blobs") == 0
        seen.add(sum(size for key, size in store.fetched.items() if "/merged/" in key and not key.endswith(".json")))
    assert seen == {0, record.bytes}


def test_another_run_replaces_the_copy_at_once(tmp_path: Path) -> None:
    """It is whole and of one of the two runs, whenever the island dies."""
    board, start, folder = template(tmp_path, 4), tmp_path / "start", tmp_path / "folder"
    template(tmp_path, 2, NEXT)
    play("island", str(board), str(start), 3)
    seen = set()
    for _ in each_point("next run", 1, places(board, folder, start)):
        check_room(folder, 3)
        shutil.copytree(folder, tmp_path / "look", dirs_exist_ok=True)
        copy = LocalCopy.open(tmp_path / "look")
        assert copy is not None
        assert copy.served.root == root(copy.served.version)
        seen.add((copy.run_id, copy.served.version))
        shutil.rmtree(tmp_path / "look")
        restart(board, folder, 1, NEXT)
    assert seen == {(RUN, 3), (NEXT, 1)}
