"""Boards from the disk layout and back, and what its receivers have been seen to get wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sprawl.board import keys
from sprawl.board.ledger import list_runs
from sprawl.board.reader import VersionReader
from sprawl.board.store import MemoryStore, Store
from sprawl.board.verify import verify_board
from sprawl.delta.files import save_state
from sprawl.delta.state import State, raw_bytes, root_digest, tensor_digests
from sprawl.errors import BoardError, IntegrityError
from sprawl.interop.convert import export_run, import_layout
from sprawl.interop.layout import CHECKSUMS, ENCODINGS, INDEX, POINTER, Encoding, Index, checksum, encode, folder_name
from sprawl.interop.shards import pack_blobs, split
from sprawl.interop.writing import LayoutWriter
from tests.board.states import FILES, RUN, publish, publisher, state_of

TRAINER = "trainer-1"


def root(state: State) -> str:
    return root_digest(tensor_digests(state))


def versions(count: int) -> list[State]:
    """Every awkward bit pattern moves once: signed zeros, NaN payloads, scalars, an empty tensor, fp8."""
    generator = torch.Generator().manual_seed(3)
    state: State = {
        "w": torch.randn(30, 20, generator=generator).bfloat16(),
        "fp8": torch.randn(64, generator=generator).to(torch.float8_e4m3fn),
        "scale": torch.tensor(1.0),
        "empty": torch.empty(0, 4),
        "fixed": torch.ones(5),
    }
    states = [state]
    for version in range(1, count):
        state = {name: tensor.clone() for name, tensor in state.items()}
        if version != 3:  # version 3 changes nothing: an empty delta
            state["w"][version] = torch.randn(20, generator=generator).bfloat16()
            state["w"][0, 0] = -0.0 if version % 2 else 0.0
            state["w"].view(torch.int16)[0, 1] = 0x7FC0 + version  # NaN payloads
            raw_bytes(state["fp8"])[version] ^= 1
            state["scale"] = torch.tensor(float(version))
        states.append(state)
    return states


def trainer(
    states: list[State], encoding: Encoding = "xor", kind: str = "adler32", first: int = 0, folder: str | None = None
) -> Store:
    """A layout as a trainer writes it: the boot checkpoint is version `first`, and not there."""
    store = MemoryStore("layout")
    writer = LayoutWriter(store, TRAINER, encoding=encoding, checksum=kind, folder=folder)
    for version in range(first + 1, len(states)):
        old = {name: raw_bytes(tensor) for name, tensor in states[version - 1].items()}
        writer.delta(version, version - 1, old, states[version])
    return store


def boot(path: Path, state: State) -> Path:
    save_state(state, path)
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("kind", CHECKSUMS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_trainers_deltas_become_versions(tmp_path: Path, encoding: Encoding, kind: str) -> None:
    states = versions(6)
    board = MemoryStore("board")
    result = import_layout(trainer(states, encoding, kind), board, base=boot(tmp_path, states[0]), keyframe_every=4)
    assert (result.run_id, result.versions) == (TRAINER, [0, 1, 2, 3, 4, 5])
    reader = VersionReader(board, TRAINER)
    for version, state in enumerate(states):
        assert reader.materialise(version).root == root(state)
    assert reader.require(3).changed_share == 0.0
    assert reader.files() == {"config.json": b"{}"}
    assert verify_board(board, TRAINER).ok
    assert [run.run_id for run in list_runs(board)] == [TRAINER]


@pytest.mark.parametrize("folder", ["updates", None])
def test_both_places_of_the_versions_are_found(tmp_path: Path, folder: str | None) -> None:
    states = versions(3)
    layout = trainer(states, folder=folder)
    assert any(key.startswith(f"{folder or TRAINER}/weight_v000001/") for key in layout.list(""))
    board = MemoryStore("board")
    assert import_layout(layout, board, base=boot(tmp_path, states[0])).versions == [0, 1, 2]


@pytest.mark.parametrize("kind", CHECKSUMS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_there_and_back(encoding: Encoding, kind: str) -> None:
    board, layout, again = MemoryStore("a"), MemoryStore("l"), MemoryStore("b")
    states = versions(6)
    writer = publisher(board)
    for version, state in enumerate(states):
        writer.publish(version, version, state)
    result = export_run(VersionReader(board, RUN), layout, encoding=encoding, checksum=kind)
    assert result.versions == [0, 1, 2, 3, 4, 5]
    assert layout.get(POINTER) == b"run-1/weight_v000005"
    index = json.loads(layout.get(f"{RUN}/{folder_name(3)}/{INDEX}"))
    assert index["weight_map"] == {}, "an empty delta"
    assert index["metadata"]["delta_encoding"] == encoding
    assert json.loads(layout.get(f"{RUN}/{folder_name(0)}/config.json")) == json.loads(FILES["config.json"])
    assert import_layout(layout, again).versions == [0, 1, 2, 3, 4, 5]
    reader = VersionReader(again, RUN)
    for version, state in enumerate(states):
        assert reader.materialise(version).root == root(state)
    assert reader.files() == FILES


def test_a_chain_of_full_versions_and_one_that_starts_late() -> None:
    board, layout, again = MemoryStore("a"), MemoryStore("l"), MemoryStore("b")
    publish(board, 9)
    export_run(VersionReader(board, RUN), layout, first=3, full_every=3)
    kinds = [
        "delta_encoding" in json.loads(layout.get(f"{RUN}/{folder_name(v)}/{INDEX}"))["metadata"] for v in range(3, 9)
    ]
    assert kinds == [False, True, True, False, True, True]
    assert import_layout(layout, again).versions == [6, 7, 8], "from the newest full version on"
    reader = VersionReader(again, RUN)
    for version in (6, 7, 8):
        assert reader.materialise(version).root == root(state_of(version))
    report = verify_board(again, RUN)
    assert report.ok, report.problems


def test_changes_of_form_are_exported_in_full() -> None:
    board, layout, again = MemoryStore("a"), MemoryStore("l"), MemoryStore("b")
    states: list[State] = [
        {"a": torch.ones(4), "b": torch.ones(3)},
        {"a": torch.ones(5), "b": torch.ones(3)},
        {"a": torch.ones(5)},
        {"a": torch.ones(5), "c": torch.ones(1)},
        {"a": torch.zeros(5), "c": torch.ones(1)},
    ]
    writer = publisher(board)
    for version, state in enumerate(states):
        writer.publish(version, version, state)
    export_run(VersionReader(board, RUN), layout)
    fulls = [
        v
        for v in range(5)
        if "delta_encoding" not in json.loads(layout.get(f"{RUN}/{folder_name(v)}/{INDEX}"))["metadata"]
    ]
    assert fulls == [0, 1, 2, 3]
    import_layout(layout, again)
    assert VersionReader(again, RUN).materialise(4).root == root(states[4])


def test_both_ways_continue_where_they_stopped(tmp_path: Path) -> None:
    board, layout, again = MemoryStore("a"), MemoryStore("l"), MemoryStore("b")
    publish(board, 4)
    assert export_run(VersionReader(board, RUN), layout, last=2).versions == [0, 1, 2]
    assert import_layout(layout, again).versions == [0, 1, 2]
    publish(board, 7)
    assert export_run(VersionReader(board, RUN), layout).versions == [3, 4, 5, 6]
    assert export_run(VersionReader(board, RUN), layout).versions == []
    assert import_layout(layout, again).versions == [3, 4, 5, 6]
    assert import_layout(layout, again).versions == []
    assert VersionReader(again, RUN).materialise(6).root == root(state_of(6))
    again.delete(keys.run(RUN))
    import_layout(layout, again)
    assert again.exists(keys.run(RUN)), "an import that died before the end is registered by the next"


def test_a_large_state_is_written_as_several_shards() -> None:
    state = {f"t{i}": torch.zeros(10) for i in range(5)} | {"big": torch.zeros(100)}
    groups = split(state, limit=90)
    assert sorted(name for group in groups for name in group) == sorted(state)
    assert groups == [["big"], ["t0", "t1"], ["t2", "t3"], ["t4"]]


# What receivers of this layout have been seen to get wrong


def imported(layout: Store, tmp_path: Path, states: list[State]) -> VersionReader:
    board = MemoryStore("board")
    import_layout(layout, board, base=boot(tmp_path / "boot", states[0]))
    return VersionReader(board, TRAINER)


def test_a_missing_index_is_not_a_full_version(tmp_path: Path) -> None:
    states = versions(3)
    layout = trainer(states)
    layout.delete(f"{TRAINER}/{folder_name(2)}/{INDEX}")
    with pytest.raises(BoardError, match=r"weight_v000002.*not there"):
        imported(layout, tmp_path, states)


def test_a_missing_shard_is_not_an_empty_delta(tmp_path: Path) -> None:
    states = versions(3)
    layout = trainer(states)
    layout.delete(f"{TRAINER}/{folder_name(2)}/delta-00001-of-00001.safetensors")
    with pytest.raises(IntegrityError, match=r"version 2 names .*which is not there"):
        imported(layout, tmp_path, states)


def test_a_wrong_base_is_noticed_by_the_checksum(tmp_path: Path) -> None:
    states = versions(3)
    wrong = [{**states[0], "w": torch.zeros_like(states[0]["w"])}, *states[1:]]
    with pytest.raises(IntegrityError, match=r"version 1, tensor 'w': the new bytes have adler32"):
        imported(trainer(states, "xor"), tmp_path, wrong)


def test_a_tensor_in_two_shards_does_not_cancel_out(tmp_path: Path) -> None:
    states = versions(3)
    layout = trainer(states)
    folder = f"{TRAINER}/{folder_name(2)}"
    (shard,) = (key for key in layout.list(folder) if key.endswith(".safetensors"))
    layout.put(f"{folder}/delta-00002-of-00002.safetensors", layout.get(shard))
    index = json.loads(layout.get(f"{folder}/{INDEX}"))
    index["weight_map"]["scale"] = "delta-00002-of-00002.safetensors"
    layout.put(f"{folder}/{INDEX}", json.dumps(index).encode())
    with pytest.raises(IntegrityError, match="its index says otherwise"):
        imported(layout, tmp_path, states)


def test_left_over_shards_are_ignored(tmp_path: Path) -> None:
    """Of an earlier attempt with another world size: the index does not name them."""
    states = versions(3)
    layout = trainer(states)
    layout.put(f"{TRAINER}/{folder_name(2)}/delta-00007-of-00008.safetensors", b"left over")
    assert imported(layout, tmp_path, states).materialise(2).root == root(states[2])


def test_a_tied_tensor_that_the_base_lacks_is_named(tmp_path: Path) -> None:
    states = versions(2)
    layout = trainer(states)
    base = {name: tensor for name, tensor in states[0].items() if name != "fp8"}
    with pytest.raises(IntegrityError, match=r"tensor 'fp8': the base, version 0, does not have it"):
        imported(layout, tmp_path, [base])


@pytest.mark.parametrize("what", ["blob", "checksum", "no checksum", "shard"])
def test_damage_is_named_and_publishes_nothing(tmp_path: Path, what: str) -> None:
    states = versions(3)
    layout = trainer(states)
    old, new = raw_bytes(states[1]["w"]), raw_bytes(states[2]["w"])
    blob, total = encode("xor", old, new, "w"), checksum("adler32", new)
    if what == "blob":
        blob = encode("xor", old, np.roll(new, 1), "w")
    sums = {"checksum": {"w": "00000000"}, "no checksum": {}}.get(what, {"w": total})
    data = pack_blobs({"w": blob}, sums) if what != "shard" else b"\x00" * 20
    folder = f"{TRAINER}/{folder_name(2)}"
    layout.put(f"{folder}/s.safetensors", data)
    layout.put(f"{folder}/{INDEX}", Index(2, 1, "xor", "adler32", {"w": "s.safetensors"}).to_bytes(1))
    board = MemoryStore("board")
    with pytest.raises(IntegrityError, match=r"weight_v000002/s\.safetensors|version 2, tensor 'w'"):
        import_layout(layout, board, base=boot(tmp_path, states[0]))
    reader = VersionReader(board, TRAINER)
    assert reader.head() == 1
    assert reader.materialise(1).root == root(states[1])


def test_a_number_used_again_is_refused(tmp_path: Path) -> None:
    """A trainer that restarts from an older checkpoint and counts on from there."""
    states = versions(4)
    board = MemoryStore("board")
    import_layout(trainer(states), board, base=boot(tmp_path, states[0]))
    other = [*states[:2], {**states[1], "scale": torch.tensor(99.0)}, {**states[1], "scale": torch.tensor(98.0)}]
    with pytest.raises(IntegrityError, match=r"version 3 of .* tensor 'scale' differs"):
        import_layout(trainer(other), board)
    with pytest.raises(IntegrityError, match=r"is at version 2, board .* has version 3"):
        import_layout(trainer(other[:3]), board)
    full = trainer(other[:2])
    LayoutWriter(full, TRAINER, encoding="xor", checksum="adler32").full(3, other[3], {})
    with pytest.raises(IntegrityError, match=r"version 3 of .* differs"):
        import_layout(full, board)
    longer = [*other[:3], states[3], {**states[3], "scale": torch.tensor(1.5)}]
    assert import_layout(trainer(longer), board).versions == [4], "version 3 is what it was"
    assert VersionReader(board, TRAINER).materialise(3).root == root(states[3])


def test_the_pointer_never_goes_back() -> None:
    states = versions(4)
    layout = trainer(states)
    writer = LayoutWriter(layout, TRAINER, encoding="xor", checksum="adler32")
    with pytest.raises(BoardError, match="at version 3 already"):
        writer.full(2, states[2], {})
    with pytest.raises(BoardError, match="holds versions of run 'trainer-1'"):
        LayoutWriter(layout, "other", encoding="xor", checksum="adler32").head()


def test_wrong_places(tmp_path: Path) -> None:
    states = versions(3)
    board = MemoryStore("board")
    with pytest.raises(BoardError, match="has no `latest`"):
        import_layout(MemoryStore("empty"), board)
    with pytest.raises(BoardError, match="give the checkpoint that the trainer started from"):
        import_layout(trainer(states), board)
    publish(board, 2)
    with pytest.raises(BoardError, match="is not an import"):
        import_layout(trainer(states), board, run_id=RUN, base=boot(tmp_path, states[0]))
    gap = trainer(states)
    gap.put(f"{TRAINER}/{folder_name(2)}/{INDEX}", Index(2, 0, "xor", "adler32", {}).to_bytes(0))
    with pytest.raises(BoardError, match="has no version 1: after 0 comes 2"):
        import_layout(gap, board, base=tmp_path)
    with pytest.raises(BoardError, match="has published no version"):
        export_run(VersionReader(board, "none"), MemoryStore("t"))
    with pytest.raises(BoardError, match="cannot export"):
        export_run(VersionReader(board, RUN), MemoryStore("t"), first=1, last=0)
