from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sprawl.board.commit import CommitOptions
from sprawl.board.directory_lock import hold
from sprawl.board.local_copy import JOURNAL, MARK, LocalCopy, pull, stage_whole, verify
from sprawl.board.local_files import fetch_files
from sprawl.board.merged import merge
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.store import MemoryStore, Store
from sprawl.delta.files import WEIGHTS
from sprawl.delta.journal import pack_overwrites
from sprawl.delta.state import State, root_digest, state_bytes, tensor_digests
from sprawl.errors import BoardError, IntegrityError, SprawlError
from tests.board.states import FILES, RUN, publish, publisher, state_of


def root(state: State) -> str:
    return root_digest(tensor_digests(state))


@pytest.fixture
def board() -> Store:
    store = MemoryStore()
    publish(store, 8, keyframe_every=3)
    return store


def test_pull_follows_the_run(board: Store, tmp_path: Path) -> None:
    reader = VersionReader(board, RUN)
    folder = tmp_path / "model"
    for version in (1, 2, 3, 7, 7):
        copy, manifest, discarded = pull(reader, folder, version)
        assert discarded is None
        assert copy.served.version == version
        assert root(load_file(folder / WEIGHTS)) == manifest.root_digest == root(state_of(version))
        assert sorted(path.name for path in folder.iterdir()) == [WEIGHTS, MARK]
    with pytest.raises(BoardError, match="newer than 4"):
        pull(reader, folder, 4)


def test_patching_in_place_keeps_the_file(board: Store, tmp_path: Path) -> None:
    reader = VersionReader(board, RUN)
    pull(reader, tmp_path, 1)
    inode = (tmp_path / WEIGHTS).stat().st_ino
    pull(reader, tmp_path, 2)
    assert (tmp_path / WEIGHTS).stat().st_ino == inode


def test_every_dtype_and_changes_of_form(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32]
    one: State = {str(d): torch.arange(1, 8).to(d) for d in dtypes}
    one |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.0), "flag": torch.tensor([True, False])}
    two = {name: tensor.clone() for name, tensor in one.items()}
    two["torch.float16"][3] = -0.0
    two["scalar"] = torch.tensor(float("nan"))
    three = {**two, "new": torch.ones(3), "torch.int32": torch.ones(2, dtype=torch.int32)}
    del three["flag"]
    store = MemoryStore()
    writer = publisher(store, keyframe_every=100)
    reader = VersionReader(store, RUN)
    for version, state in enumerate((one, two, three, one)):
        writer.publish(version, version, state)
        copy, _, _ = pull(reader, tmp_path, version)
        assert copy.served.root == root(load_file(tmp_path / WEIGHTS)) == root(state)
    assert LocalCopy.open(tmp_path) is not None


def test_a_half_applied_patch_is_finished(board: Store, tmp_path: Path) -> None:
    reader = VersionReader(board, RUN)
    copy, _, _ = pull(reader, tmp_path, 1)
    prepared = reader.prepare(copy.served, 2)
    note = {"run_id": RUN, "version": 2, "root_digest": prepared.manifest.root_digest}
    (tmp_path / JOURNAL).write_bytes(b"".join(pack_overwrites(prepared.overwrites, note)))
    patch = prepared.overwrites.patches["w"]
    flat = copy.served.state["w"].view(torch.int16).reshape(-1)
    half = patch.indices[: patch.indices.size // 2].astype("i8")
    flat[torch.from_numpy(half)] = torch.from_numpy(patch.values[: half.size].view("i2"))
    assert root(load_file(tmp_path / WEIGHTS)) not in (root(state_of(1)), root(state_of(2)))
    found = LocalCopy.open(tmp_path)
    assert found is not None
    assert (found.served.version, found.served.root) == (2, root(state_of(2)))
    assert not (tmp_path / JOURNAL).exists()


def test_a_torn_journal_changes_nothing(board: Store, tmp_path: Path) -> None:
    reader = VersionReader(board, RUN)
    pull(reader, tmp_path, 1)
    (tmp_path / JOURNAL).write_bytes(b"SPRWLJNL half of it")
    found = LocalCopy.open(tmp_path)
    assert found is not None
    assert (found.served.version, found.served.root) == (1, root(state_of(1)))


@pytest.mark.parametrize("damage", ["weights", "mark", "empty mark", "not safetensors"])
def test_a_damaged_copy_is_named_and_replaced(board: Store, tmp_path: Path, damage: str) -> None:
    reader = VersionReader(board, RUN)
    pull(reader, tmp_path, 1)
    file = {"weights": WEIGHTS, "not safetensors": WEIGHTS}.get(damage, MARK)
    data = bytearray((tmp_path / file).read_bytes())
    match damage:
        case "weights":
            data[-3] ^= 1
        case "mark":
            data = data.replace(root(state_of(1)).encode(), b"0" * 64)
        case "empty mark":
            data = bytearray()
        case _:
            data = bytearray(b"\xff" * 20)
    (tmp_path / file).write_bytes(data)
    with pytest.raises(IntegrityError, match=str(tmp_path)):
        LocalCopy.open(tmp_path)
    copy, _, discarded = pull(reader, tmp_path, 5)
    assert discarded is not None
    assert copy.served.root == root(load_file(tmp_path / WEIGHTS)) == root(state_of(5))


def test_a_version_number_used_again_is_noticed(board: Store, tmp_path: Path) -> None:
    pull(VersionReader(board, RUN), tmp_path, 2)
    again = MemoryStore()
    writer = publisher(again)
    for version in range(4):
        writer.publish(version, version, state_of(version, seed=9))
    with pytest.raises(IntegrityError, match="published again"):
        pull(VersionReader(again, RUN), tmp_path, 2)
    before = (tmp_path / WEIGHTS).read_bytes()
    with pytest.raises(IntegrityError, match="applies to version 2"):
        pull(VersionReader(again, RUN), tmp_path, 3)
    assert (tmp_path / WEIGHTS).read_bytes() == before


def test_a_manifest_that_lies_leaves_the_copy_alone(board: Store, tmp_path: Path) -> None:
    reader = VersionReader(board, RUN)
    copy, _, _ = pull(reader, tmp_path, 1)
    prepared = reader.prepare(copy.served, 2)
    lie = prepared.manifest.model_copy(update={"root_digest": "0" * 64})
    before = (tmp_path / WEIGHTS).read_bytes()
    with pytest.raises(IntegrityError, match="version 2"):
        copy.step(reader, type(prepared)(2, 1, prepared.base_root, lie, prepared.overwrites, 0))
    assert (tmp_path / WEIGHTS).read_bytes() == before
    assert not (tmp_path / JOURNAL).exists()


def test_wrong_places(board: Store, tmp_path: Path) -> None:
    reader = VersionReader(board, RUN)
    assert LocalCopy.open(tmp_path) is None
    (tmp_path / "file").write_text("")
    with pytest.raises(SprawlError, match="cannot write"):
        pull(reader, tmp_path / "file", 1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model-00001-of-00002.safetensors").write_text("")
    with pytest.raises(SprawlError, match="already holds"):
        pull(reader, tmp_path / "other", 1)
    pull(reader, tmp_path / "a", 1)
    store = MemoryStore()
    Publisher(store, "run-2", CommitOptions(keyframe_every=2, dtype="bfloat16")).publish(0, 0, state_of(0))
    with pytest.raises(BoardError, match="holds a version of run 'run-1'"):
        pull(VersionReader(store, "run-2"), tmp_path / "a", 0)


def test_a_copy_that_was_away_takes_the_merged_delta(board: Store, tmp_path: Path) -> None:
    reader = VersionReader(board, RUN)
    pull(reader, tmp_path, 1)
    record = merge(reader, 1, 7)
    before = reader.bytes_read
    pull(reader, tmp_path, 7)
    assert reader.bytes_read - before == record.bytes


def test_a_model_of_somebody_else_is_not_overwritten(board: Store, tmp_path: Path) -> None:
    save_file(state_of(0), tmp_path / WEIGHTS)
    before = (tmp_path / WEIGHTS).read_bytes()
    with pytest.raises(SprawlError, match=f"already holds {WEIGHTS}"):
        pull(VersionReader(board, RUN), tmp_path, 1)
    assert (tmp_path / WEIGHTS).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS]


def test_one_process_at_a_time(board: Store, tmp_path: Path) -> None:
    reader = VersionReader(board, RUN)
    with hold(tmp_path), pytest.raises(SprawlError, match="in use by another process"):
        pull(reader, tmp_path, 1)
    pull(reader, tmp_path, 1)


def test_the_journal_is_never_larger_than_the_weights(tmp_path: Path) -> None:
    """A patch of most of a tensor takes three times its bytes; the tensor is written down instead."""
    store = MemoryStore()
    writer = publisher(store, keyframe_every=100)
    one = {"w": torch.randn(30_000, generator=torch.Generator().manual_seed(0)).bfloat16(), "few": torch.ones(9)}
    two = {"w": one["w"] * 1.02, "few": one["few"].clone()}
    two["few"][3] = 2.0
    for version, state in enumerate((one, two)):
        writer.publish(version, version, state)
    reader = VersionReader(store, RUN)
    copy, _, _ = pull(reader, tmp_path, 0)
    prepared = reader.prepare(copy.served, 1)
    assert set(prepared.overwrites.patches) == {"w", "few"}, "as patches they would not fit"
    staged = copy.stage(reader, prepared)
    assert (tmp_path / JOURNAL).stat().st_size < state_bytes(one) + 1000
    assert root(load_file(tmp_path / WEIGHTS)) == root(one), "staging touches nothing"
    copy.commit(reader, staged)
    assert root(load_file(tmp_path / WEIGHTS)) == root(two)
    assert (tmp_path / JOURNAL).exists(), "until the file is flushed"
    copy.settle()
    assert sorted(path.name for path in tmp_path.iterdir()) == [WEIGHTS, MARK]


def test_a_staged_step_that_is_not_taken_is_forgotten(board: Store, tmp_path: Path) -> None:
    reader = VersionReader(board, RUN)
    copy, _, _ = pull(reader, tmp_path, 1)
    copy.stage(reader, reader.prepare(copy.served, 2))
    stage_whole(tmp_path, RUN, reader.materialise(4))
    copy.step(reader, reader.prepare(copy.served, 3))
    assert (copy.served.version, root(load_file(tmp_path / WEIGHTS))) == (3, root(state_of(3)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [WEIGHTS, MARK]


def test_files_beside_the_weights_are_fetched_once(board: Store, tmp_path: Path) -> None:
    reader = VersionReader(board, RUN)
    manifest = reader.require(5)
    assert fetch_files(reader, tmp_path / "new", manifest) == FILES
    before = reader.bytes_read
    assert fetch_files(reader, tmp_path / "new", manifest) == FILES
    assert reader.bytes_read == before
    (tmp_path / "new" / "config.json").write_bytes(b"{]")
    assert fetch_files(reader, tmp_path / "new", manifest) == FILES
    assert (tmp_path / "new" / "config.json").read_bytes() == FILES["config.json"]
    store = MemoryStore()
    Publisher(store, "evil", CommitOptions(keyframe_every=2, dtype="bfloat16", files={WEIGHTS: b"x"})).publish(
        0, 0, state_of(0)
    )
    other = VersionReader(store, "evil")
    with pytest.raises(IntegrityError, match="cannot replace"):
        fetch_files(other, tmp_path, other.require(0))


def test_weights_are_verified_beside_the_one_who_steps_them(board: Store, tmp_path: Path) -> None:
    reader = VersionReader(board, RUN)
    copy, _, _ = pull(reader, tmp_path, 1)
    verify(tmp_path)
    staged = copy.stage(reader, reader.prepare(copy.served, 2))
    copy.commit(reader, staged)
    verify(tmp_path)
    copy.settle()
    copy.served.state["w"][3, 3] += 1
    with pytest.raises(IntegrityError, match="is damaged: it should be version 2"):
        verify(tmp_path)
