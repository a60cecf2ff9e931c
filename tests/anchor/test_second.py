"""Two anchors on one board, with other bits: the first commit of a fire decides which M is the run's, for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from sprawl.anchor.service import AnchorService
from sprawl.anchor.state import read_state, write_state
from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.store import MemoryStore, Store
from sprawl.errors import IntegrityError
from tests.anchor.board import RUN, anchor_config, make_board

FIRES = (4, 8, 12, 16)


class Overtaken:
    """A store on which something happens just before the first call that `before` names."""

    def __init__(self, store: MemoryStore, before: tuple[str, str], act: Callable[[], Any]) -> None:
        self._store, self._before, self._act = store, before, act

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name != self._before[0]:
            return found

        def called(key: str, *arguments: Any) -> Any:
            if key.startswith(self._before[1]) and self._act is not None:
                act, self._act = self._act, None  # type: ignore[assignment]
                act()
            return found(key, *arguments)

        return called


@pytest.fixture(scope="module")
def trained() -> MemoryStore:
    store = MemoryStore()
    make_board(store, anchor_config(16, checkpoint={"keep": 100}))
    return store


@pytest.fixture
def store(trained: MemoryStore) -> MemoryStore:
    return copy(trained)


def copy(store: MemoryStore) -> MemoryStore:
    made = MemoryStore()
    made._objects.update(store._objects)
    return made


def other_anchor(store: Any) -> AnchorService:
    """An anchor whose M has other bits, as on other hardware, only more so."""
    made = AnchorService(store, RUN)
    made.config = made.config.model_copy(update={"anchor": made.config.anchor.model_copy(update={"fold": 0.5})})
    return made


def momentum(store: Store, step: int) -> dict[str, torch.Tensor]:
    record = Ledger(store, RUN).fire(step)
    assert record is not None
    return read_state(store, RUN, record)


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one | two)


def states(store: MemoryStore) -> list[str]:
    return store.list(keys.anchor_states(RUN))


def committed(store: MemoryStore, *steps: int) -> list[str]:
    records = [Ledger(store, RUN).fire(step) for step in steps]
    return [keys.anchor_state(RUN, record.step, record.state_digest) for record in records if record]


def test_an_anchor_that_comes_second_changes_nothing(store: MemoryStore) -> None:
    """Every time its M is on the board already when the first one commits."""
    alone, first = AnchorService(copy(store), RUN), AnchorService(store, RUN)
    for step in FIRES:
        second = other_anchor(Overtaken(store, ("create", keys.fires(RUN)), lambda at=step: first.fire(at)))
        assert second.fire(step) == first.ledger.fire(step)
        alone.fire(step)
        assert same(momentum(store, step), momentum(alone.store, step))
    assert states(store) == committed(store, 12, 16)


def test_one_that_lost_a_fire_goes_on_from_the_winners_m(store: MemoryStore) -> None:
    winner = other_anchor(store)
    loser = AnchorService(Overtaken(store, ("create", keys.fires(RUN)), lambda: winner.fire(4)), RUN)  # type: ignore[arg-type]
    assert loser.fire(4) == winner.ledger.fire(4)
    fresh = copy(store)
    loser.fire(8)
    AnchorService(fresh, RUN).fire(8)
    assert same(momentum(store, 8), momentum(fresh, 8))


def test_one_that_is_left_far_behind_takes_what_was_committed(store: MemoryStore) -> None:
    first = AnchorService(store, RUN)
    first.fire(4)
    behind = AnchorService(
        Overtaken(store, ("get", keys.checkpoints(RUN)), lambda: [first.fire(step) for step in (8, 12, 16)]),  # type: ignore[arg-type]
        RUN,
    )
    assert behind.fire(8) == first.ledger.fire(8)
    assert states(store) == committed(store, 12, 16)


def test_what_a_killed_anchor_left_is_dropped_and_what_is_under_way_is_not(store: MemoryStore) -> None:
    anchor = AnchorService(store, RUN)
    anchor.fire(4)
    noise = {"x": torch.ones(2)}
    left = [keys.anchor_state(RUN, step, write_state(store, RUN, step, noise)) for step in (4, 8)]
    coming = keys.anchor_state(RUN, 12, write_state(store, RUN, 12, noise))
    anchor.fire(8)
    assert not any(store.exists(key) for key in left)
    assert states(store) == sorted([*committed(store, 4, 8), coming])


def test_a_damaged_state_is_refused(store: MemoryStore) -> None:
    AnchorService(store, RUN).fire(4)
    (key,) = states(store)
    store.put(key, save({name: tensor + 1 for name, tensor in load(store.get(key)).items()}))
    with pytest.raises(IntegrityError, match="state after fire 4: its bytes are not the committed ones"):
        AnchorService(store, RUN).fire(8)
    store.delete(key)
    with pytest.raises(IntegrityError, match="state after fire 4 is gone"):
        AnchorService(store, RUN).fire(8)


def test_a_run_begun_by_an_older_release_goes_on(store: MemoryStore) -> None:
    """Its records name no M, which lies under the number of its fire alone."""
    AnchorService(store, RUN).fire(4)
    fresh = copy(store)
    (key,) = states(store)
    record = Ledger(store, RUN).fire(4)
    assert record is not None
    store.put(keys.anchor_state(RUN, 4), store.get(key))
    store.delete(key)
    store.put(keys.fire(RUN, 4), record.model_copy(update={"state_digest": None}).model_dump_json().encode())
    for at in (store, fresh):
        anchor = AnchorService(at, RUN)
        for step in (8, 12):
            anchor.fire(step)
    assert same(momentum(store, 12), momentum(fresh, 12))
    assert states(store) == committed(store, 8, 12)
