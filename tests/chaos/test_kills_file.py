"""kill -9 of publishers and appliers at every write point, on a local board.

Nothing is random: a victim dies before its n-th write, in the middle of it, or inside an in-place patch, for every n.
The whole set is run every time; what it counts is asserted at the end.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sprawl.board import keys
from sprawl.board.local_copy import LocalCopy
from sprawl.board.merged import read_merged
from sprawl.board.reader import VersionReader
from sprawl.board.store import Store, open_store
from sprawl.board.verify import verify_board
from sprawl.delta.state import root_digest, tensor_digests
from tests.chaos.killing import each_point
from tests.chaos.scenes import RESHAPED, RUN, play, publish, root

pytestmark = pytest.mark.slow
KILLS: dict[str, int] = {}


def template(tmp_path: Path, versions: int) -> Path:
    board = tmp_path / "template"
    store = open_store(str(board), create=True)
    for version in range(versions):
        publish(store, version)
    return board


def places(tmp_path: Path, board: Path, folder: Path | None = None) -> Callable[[int], tuple[str, str]]:
    """Every kill happens on its own copy of a board (and of a folder)."""

    def place(point: int) -> tuple[str, str]:
        here, beside = tmp_path / "board", tmp_path / "folder"
        for target, source in ((here, board), (beside, folder)):
            shutil.rmtree(target, ignore_errors=True)
            if source is not None:
                shutil.copytree(source, target)
        return str(here), str(beside)

    return place


def sound(store: Store, heads: set[int | None]) -> int | None:
    """The newest version on the board, which is one of `heads`; every version on it can be rebuilt."""
    reader = VersionReader(store, RUN)
    head = reader.head()
    assert head in heads
    if head is not None:
        report = verify_board(store, RUN)
        assert report.ok, report.problems
        assert reader.materialise(head).root == root(head)
    return head


@pytest.mark.parametrize(
    ("scene", "version"), [("publish", 0), ("publish", 3), ("publish", 4), ("publish", RESHAPED), ("parts", 4)]
)
def test_publishers(tmp_path: Path, scene: str, version: int) -> None:
    """Half a version is never seen, and the same call again is all it takes."""
    board = template(tmp_path, version)
    before = version - 1 if version else None
    seen = set()
    for _ in each_point(scene, version, places(tmp_path, board)):
        store = open_store(str(tmp_path / "board"), create=True)
        seen.add(sound(store, {before, version}))
        play(scene, str(tmp_path / "board"), "", version)
        assert sound(store, {version}) == version
        publish(store, version + 1)
        assert sound(store, {version + 1}) == version + 1
        KILLS[f"{scene} {version}"] = KILLS.get(f"{scene} {version}", 0) + 1
    assert seen == {before, version}, "kills fell on both sides of the commit"


@pytest.mark.parametrize(("start", "version"), [(None, 3), (2, 3), (1, 5), (5, RESHAPED)])
def test_appliers(tmp_path: Path, start: int | None, version: int) -> None:
    """From nothing, in place, in place over several versions, and with a change of form (the file is exchanged)."""
    board = template(tmp_path, 8)
    folder = tmp_path / "start"
    if start is not None:
        play("pull", str(board), str(folder), start)
    seen = set()
    for _ in each_point("pull", version, places(tmp_path, board, folder if start is not None else None)):
        copy = LocalCopy.open(tmp_path / "folder")
        found = None if copy is None else copy.served.version
        assert found in {start, version}
        if copy is not None:
            assert copy.served.root == root(copy.served.version)
        seen.add(found)
        del copy
        play("pull", str(board), str(tmp_path / "folder"), version)
        assert root_digest(tensor_digests(load_file(tmp_path / "folder" / "model.safetensors"))) == root(version)
        assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["model.safetensors", "sprawl.json"]
        KILLS[f"pull {start}-{version}"] = KILLS.get(f"pull {start}-{version}", 0) + 1
    assert seen == {start, version}


def test_appliers_killed_while_they_recover(tmp_path: Path) -> None:
    """The journal is replayed, the process dies again, and again."""
    board = template(tmp_path, 3)
    play("pull", str(board), str(tmp_path / "start"), 1)
    half = tmp_path / "half"
    for _ in each_point("pull", 2, places(tmp_path, board, tmp_path / "start")):
        if (tmp_path / "folder" / "sprawl.journal").exists():
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(tmp_path / "folder", half)
            for _ in each_point("pull", 2, places(tmp_path / "again", board, half)):
                copy = LocalCopy.open(tmp_path / "again" / "folder")
                assert copy is not None
                assert copy.served.root == root(copy.served.version)
                KILLS["recover"] = KILLS.get("recover", 0) + 1
    assert KILLS["recover"] > 10


def test_retention(tmp_path: Path) -> None:
    board = template(tmp_path, 10)
    play("merge", str(board), "", 3)
    expected: list[str] | None = None
    for _ in each_point("gc", 0, places(tmp_path, board)):
        store = open_store(str(tmp_path / "board"))
        reader = VersionReader(store, RUN)
        versions = reader.versions()
        assert versions[-1] == 9
        assert {8, 9} <= set(versions)
        for version in versions:
            assert reader.materialise(version).root == root(version), "a version is there and whole, or not there"
        play("gc", str(tmp_path / "board"), "", 0)
        left = store.list(f"{RUN}/")
        expected = expected or left
        assert left == expected
        assert verify_board(store, RUN).ok
        KILLS["gc"] = KILLS.get("gc", 0) + 1
    assert expected is not None
    assert not any(key.startswith(keys.blobs(RUN, 7)) for key in expected)


def test_merging(tmp_path: Path) -> None:
    board = template(tmp_path, 7)
    seen = set()
    for _ in each_point("merge", 6, places(tmp_path, board)):
        store = open_store(str(tmp_path / "board"))
        reader = VersionReader(store, RUN)
        seen.add(read_merged(reader, 0, 6) is not None)
        assert verify_board(store, RUN).ok
        play("merge", str(tmp_path / "board"), "", 6)
        served = reader.materialise(0)
        reader.commit(served, reader.prepare(served, 6))
        assert served.root == root(6)
        assert verify_board(store, RUN).merged == 1
        KILLS["merge"] = KILLS.get("merge", 0) + 1
    assert seen == {False, True}


@pytest.mark.parametrize("scene", ["export", "import"])
def test_converters(tmp_path: Path, scene: str) -> None:
    """Through the other projects' layout and back: one of the two dies, both are called again."""
    board, layout, empty = template(tmp_path, 3), tmp_path / "layout", tmp_path / "empty"
    play("export", str(board), str(layout), 2)
    empty.mkdir()
    start = (board, None) if scene == "export" else (empty, layout)
    for _ in each_point(scene, 2, places(tmp_path, *start)):
        if scene == "export":
            play("export", str(board), str(tmp_path / "folder"), 2)
            shutil.rmtree(tmp_path / "back", ignore_errors=True)
            target = tmp_path / "back"
        else:
            target = tmp_path / "board"
            sound(open_store(str(target)), {None, 0, 1, 2})
        play("import", str(target), str(tmp_path / "folder"), 2)
        assert sound(open_store(str(target)), {2}) == 2
        KILLS[scene] = KILLS.get(scene, 0) + 1


def test_count() -> None:
    """Runs last. The number moves when the code writes differently; it must not shrink unnoticed."""
    print(KILLS, sum(KILLS.values()))
    if len(KILLS) < 14:
        pytest.skip("the tests above were not all run")
    assert sum(KILLS.values()) >= 200
