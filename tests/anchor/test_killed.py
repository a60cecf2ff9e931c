"""kill -9 of the anchor before every write: the next one goes on from what is durable, with the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sprawl.anchor.service import AnchorService, serve
from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.store import Store, open_store
from tests.anchor.board import RUN, anchor_config, make_board
from tests.anchor.killed import main
from tests.forking import context

WRITES = 10  # M, sign map and record of three fires, and the first M is dropped after the third
FIRES = (4, 8, 12)


def products(store: Store) -> dict[str, bytes]:
    """M after the last fire, and every sign map, each under its digest."""
    return {key: store.get(key) for key in [state(store, FIRES[-1]), *store.list(f"{RUN}/anchor/signs/")]}


def state(store: Store, step: int) -> str:
    """The key of M after a committed fire."""
    record = Ledger(store, RUN).fire(step)
    assert record is not None
    assert record.state_digest is not None
    return keys.anchor_state(RUN, step, record.state_digest)


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("anchor") / "board"
    make_board(open_store(str(path), create=True), anchor_config(12, forecast="fit4"))
    return path


@pytest.fixture(scope="module")
def undisturbed(board: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    copy = tmp_path_factory.mktemp("anchor") / "undisturbed"
    shutil.copytree(board, copy)
    serve(AnchorService(str(copy), RUN))
    return products(open_store(str(copy)))


@pytest.mark.parametrize("deadly", range(1, WRITES + 1))
def test_a_killed_anchor_goes_on_bit_for_bit(
    deadly: int, board: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    copy = tmp_path / "board"
    shutil.copytree(board, copy)
    victim = context().Process(target=main, args=(str(copy), deadly))
    victim.start()
    victim.join(120)
    assert victim.exitcode == -9
    store = open_store(str(copy))
    anchor = AnchorService(store, RUN)
    committed = [record.step for record in anchor.ledger.fires()]
    assert committed == list(FIRES[: len(committed)])
    serve(anchor)
    assert [record.step for record in anchor.ledger.fires()] == list(FIRES)
    assert products(store) == undisturbed
    # The two newest M are left; a third one only where the very last write was to drop it.
    states = [state(store, step) for step in FIRES]
    assert store.list(keys.anchor_states(RUN)) == (states if deadly == WRITES else states[1:])
