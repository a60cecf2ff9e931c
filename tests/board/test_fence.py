"""A writer whose successor took over: nothing it writes reaches the board, and what was on its way replaces nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sprawl.board import keys
from sprawl.board.commit import CommitOptions
from sprawl.board.fence import FencedStore
from sprawl.board.ledger import Ledger
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.store import MemoryStore
from sprawl.delta.state import State, root_digest, tensor_digests
from sprawl.errors import FencedError, OvertakenError

RUN = "r"


def state(value: float) -> State:
    return {"w": torch.full((64,), value, dtype=torch.bfloat16)}


def writer(store: FencedStore | MemoryStore, epoch: int) -> Publisher:
    return Publisher(
        store, RUN, CommitOptions(keyframe_every=4, dtype="bfloat16", epoch=epoch, writer=f"trainer-{epoch}")
    )


WRITES: dict[str, Callable[[FencedStore], object]] = {
    "put": lambda store: store.put(keys.latest(RUN), b"{}"),
    "create a step's record": lambda store: store.create(keys.step(RUN, 1), b"{}"),
    "create rollouts": lambda store: store.create(keys.rollouts(RUN, 1), b"rows"),
    "create a sign map's record": lambda store: store.create(keys.fire(RUN, 4), b"{}"),
    "put a checkpoint's blob": lambda store: store.put(keys.checkpoint_blob(RUN, 2, "masters", "ab"), b"w"),
    "delete": lambda store: store.delete(keys.checkpoint(RUN, 2)),
    "sweep": lambda store: store.sweep(f"{RUN}/", 0.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_fenced_writer_changes_nothing(write: Callable[[FencedStore], object]) -> None:
    board = MemoryStore()
    ledger = Ledger(board, RUN)
    zombie = FencedStore(board, RUN, ledger.acquire_epoch())
    write(zombie)  # still the one writer
    board.put(keys.checkpoint(RUN, 2), b"committed")
    ledger.acquire_epoch()
    before = {key: board.get(key) for key in board.list("")}
    with pytest.raises(FencedError, match="took over"):
        write(zombie)
    assert {key: board.get(key) for key in board.list("")} == before
    assert zombie.get(keys.checkpoint(RUN, 2)) == b"committed"  # it may look


class Suspended(MemoryStore):
    """A board whose next write of a kind is held up until `meanwhile` has happened."""

    kind = ""
    meanwhile: Callable[[], None] | None = None

    def create(self, key: str, data: bytes) -> bool:
        self._hold(key)
        return super().create(key, data)

    def _hold(self, key: str) -> None:
        if self.meanwhile is not None and self.kind in key:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()


@pytest.mark.parametrize("same", [True, False], ids=["same bits", "other bits"])
def test_a_commit_that_was_already_past_the_fence_counts_once(same: bool) -> None:
    """Stopped between the question and the write, the old writer commits its step next to its successor."""
    board = Suspended()
    ledger = Ledger(board, RUN)
    first = ledger.acquire_epoch()
    old = writer(FencedStore(board, RUN, first), first)
    old.publish(0, 0, state(0))
    taken: list[Publisher] = []

    def take_over() -> None:
        epoch = ledger.acquire_epoch()
        taken.append(writer(FencedStore(board, RUN, epoch), epoch))
        taken[0].resume(state(0), 0)

    board.kind, board.meanwhile = "manifests", take_over
    with pytest.raises(FencedError):  # its manifest got through, whatever comes after does not
        old.publish(1, 1, state(1))
    mine = state(1 if same else 1.5)
    if same:
        assert taken[0].publish(1, 1, mine).already_committed
    else:
        with pytest.raises(OvertakenError, match=r"version 1 .*earlier writer \(epoch 1\).*resume"):
            taken[0].publish(1, 1, mine)
    reader = VersionReader(board, RUN)
    assert reader.head() == 1
    assert reader.materialise(1).root == root_digest(tensor_digests(state(1)))
    again = writer(FencedStore(board, RUN, 2), 2)  # what resuming does
    again.resume(None, 1)
    assert again.publish(2, 2, state(2)).version == 2
    with pytest.raises(FencedError):
        old.publish(3, 3, state(9))
