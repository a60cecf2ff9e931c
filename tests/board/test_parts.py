"""Several writers of one version, in this process and as real processes."""

from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from sprawl.board import keys
from sprawl.board.commit import CommitOptions
from sprawl.board.parts import Part, PartCommitter, PartWriter
from sprawl.board.reader import VersionReader
from sprawl.board.store import MemoryStore, Store, open_store
from sprawl.board.verify import verify_board
from sprawl.delta.state import State, root_digest, tensor_digests
from sprawl.errors import BoardError, IntegrityError
from tests.board.states import FILES, RUN
from tests.forking import context

EVERY = 3
NAMES = [f"t{i}" for i in range(7)]


def whole(version: int) -> State:
    state = {}
    for i, name in enumerate(NAMES):
        generator = torch.Generator().manual_seed(i)
        tensor = torch.randn(40, 9, generator=generator).bfloat16()
        for step in range(1, version + 1):
            if (i + step) % 3:  # not every tensor moves in every step
                tensor[step % 40] = torch.randn(9, generator=generator.manual_seed(100 * i + step)).bfloat16()
        state[name] = tensor
    return state


def owned(version: int, rank: int, world: int) -> State:
    return {name: tensor for i, (name, tensor) in enumerate(whole(version).items()) if i % world == rank}


def root(version: int) -> str:
    return root_digest(tensor_digests(whole(version)))


def writers(store: Store, world: int) -> list[PartWriter]:
    return [PartWriter(store, RUN, writer=f"rank-{rank}", keyframe_every=EVERY) for rank in range(world)]


def committer(store: Store) -> PartCommitter:
    return PartCommitter(
        store, RUN, CommitOptions(keyframe_every=EVERY, dtype="bfloat16", files=FILES, writer="rank-0")
    )


def parts(ranks: list[PartWriter], version: int) -> list[Part]:
    return [writer.write(version, owned(version, rank, len(ranks))) for rank, writer in enumerate(ranks)]


def publish(store: Store, versions: int, world: int = 3) -> None:
    ranks, rank_0 = writers(store, world), committer(store)
    for version in range(versions):
        rank_0.commit(version, version, parts(ranks, version))


def test_versions_of_several_writers_are_rebuilt_bit_for_bit(store: Store) -> None:
    publish(store, 8)
    reader = VersionReader(store, RUN)
    served = reader.materialise(0)
    for version in range(8):
        reader.advance(served, version)
        assert served.root == root(version) == reader.materialise(version).root
    manifest = reader.require(6)
    assert manifest.writers == ["rank-0", "rank-1", "rank-2"]
    assert len(manifest.parts("delta")) == len(manifest.parts("keyframe")) == 3
    assert reader.files() == FILES
    report = verify_board(store, RUN)
    assert report.ok, report.problems
    assert set(reader.require(7).tensors) < set(NAMES), "a delta names what changed"


def test_the_world_size_may_change_and_ranks_may_restart(store: Store) -> None:
    """Left-over parts of another world size are never mixed in: the manifest names every blob."""
    publish(store, 4, world=3)
    ranks = writers(store, 2)
    for version in (4, 5):
        committer(store).commit(version, version, parts(ranks, version))
    ranks[1] = writers(store, 2)[1]
    receipt = committer(store).commit(6, 6, parts(ranks, 6))
    assert receipt.root_digest == root(6) == VersionReader(store, RUN).materialise(6).root
    assert verify_board(store, RUN).ok


def test_ownership_moves_and_tensors_go_and_come(store: Store) -> None:
    ranks, rank_0 = writers(store, 2), committer(store)
    states: list[list[State]] = [
        [{"a": torch.ones(4), "gone": torch.ones(2)}, {"b": torch.zeros(3)}],
        [{"a": torch.ones(4)}, {"b": torch.ones(3), "new": torch.ones(1, dtype=torch.bfloat16)}],
        [{"a": torch.ones(4), "b": torch.zeros(3)}, {"new": torch.ones(2, dtype=torch.bfloat16)}],
        [{}, {"new": torch.ones(2, dtype=torch.bfloat16), "a": torch.ones(4), "b": torch.zeros(3)}],
    ]
    reader = VersionReader(store, RUN)
    for version, split in enumerate(states):
        rank_0.commit(version, version, [ranks[i].write(version, state) for i, state in enumerate(split)])
        if version == 0:
            served = reader.materialise(0)
        reader.advance(served, version)
        expected = {name: tensor for state in split for name, tensor in state.items()}
        assert served.root == root_digest(tensor_digests(expected))
        assert set(served.state) == set(expected)
    assert reader.require(1).removed == ["gone"]
    assert verify_board(store, RUN).ok


def test_a_tensor_with_two_owners_is_refused(store: Store) -> None:
    """Tied and pipeline-replicated tensors: the kind of fault that cancels an XOR."""
    ranks = writers(store, 2)
    split = [ranks[0].write(0, {"a": torch.ones(2), "tied": torch.ones(2)}), ranks[1].write(0, {"tied": torch.ones(2)})]
    with pytest.raises(IntegrityError, match=r"version 0: tensor 'tied' is in the parts of rank-0 and rank-1"):
        committer(store).commit(0, 0, split)
    assert VersionReader(store, RUN).head() is None


def test_incomplete_and_foreign_parts_are_refused(store: Store) -> None:
    publish(store, 2)
    ranks = writers(store, 3)
    three = parts(ranks, 2)
    with pytest.raises(IntegrityError, match="version 2: the writers' bases add up to"):
        committer(store).commit(2, 2, three[:2])
    with pytest.raises(IntegrityError, match="is of version 2 of run"):
        committer(store).commit(3, 3, three)
    with pytest.raises(BoardError, match="no version 4"):
        parts(ranks, 5)
    disagreeing = PartWriter(store, RUN, writer="rank-0", keyframe_every=2)
    with pytest.raises(IntegrityError, match=r"version 2: rank-0 wrote \['delta', 'keyframe'\].*needs \['delta'\]"):
        committer(store).commit(2, 2, [disagreeing.write(2, owned(2, 0, 3)), three[1], three[2]])
    lost = three[1].blobs[0]
    store.delete(keys.blob(RUN, 2, lost.digest))
    with pytest.raises(IntegrityError, match=rf"{lost.digest} of rank-1 is not on the board"):
        committer(store).commit(2, 2, three)
    assert VersionReader(store, RUN).head() == 1
    with pytest.raises(IntegrityError, match="not a part"):
        Part.from_json("{}")


def test_committing_again_is_idempotent_and_another_state_is_refused(store: Store) -> None:
    publish(store, 3)
    before = store.list("")
    ranks = writers(store, 3)
    assert committer(store).commit(2, 2, parts(ranks, 2)).already_committed
    assert store.list("") == before
    changed = owned(2, 0, 3)
    changed["t0"][0, 0] = 5.0
    again = [ranks[0].write(2, changed), *parts(ranks, 2)[1:]]
    with pytest.raises(IntegrityError, match="never mean two states"):
        committer(store).commit(2, 2, again)


def test_part_survives_its_journey() -> None:
    store = MemoryStore()
    part = writers(store, 1)[0].write(0, owned(0, 0, 1))
    assert Part.from_json(part.model_dump_json()) == part


def _rank(board: str, rank: int, world: int, link: Connection) -> None:
    writer = PartWriter(open_store(board), RUN, writer=f"rank-{rank}", keyframe_every=EVERY)
    while (version := link.recv()) is not None:
        link.send(writer.write(version, owned(version, rank, world)).model_dump_json())


@pytest.mark.slow
def test_ranks_are_processes(tmp_path: Path) -> None:
    world = 3
    board = str(tmp_path / "board")
    store = open_store(board, create=True)
    processes = context()
    links: list[Connection] = []
    ranks = []
    try:
        for rank in range(world):
            ours, theirs = processes.Pipe()
            process = processes.Process(target=_rank, args=(board, rank, world, theirs), daemon=True)
            process.start()
            links.append(ours)
            ranks.append(process)
        rank_0 = committer(store)
        for version in range(5):
            if version == 3:  # one rank dies between versions and comes back knowing nothing
                ranks[1].kill()
                ranks[1].join()
                links[1], theirs = processes.Pipe()
                ranks[1] = processes.Process(target=_rank, args=(board, 1, world, theirs), daemon=True)
                ranks[1].start()
            for link in links:
                link.send(version)
            rank_0.commit(version, version, [Part.from_json(link.recv()) for link in links])
        for link in links:
            link.send(None)
        for process in ranks:
            process.join(30)
            assert process.exitcode == 0
    finally:
        for process in ranks:
            process.kill()
    report = verify_board(store, RUN)
    assert report.ok, report.problems
    assert report.versions == 5
    assert VersionReader(store, RUN).materialise(4).root == root(4)
