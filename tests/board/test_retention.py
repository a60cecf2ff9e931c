import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.reader import VersionReader
from sprawl.board.records import CheckpointRecord, IslandRecord
from sprawl.board.retention import gc, plan_gc
from sprawl.board.store import MemoryStore, Store
from sprawl.board.verify import verify_board
from sprawl.errors import BoardError
from tests.board.states import FILES, RUN, publish, publisher, state_of
from tests.report.plausible import make_fire, make_step


@given(
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(1, 70),
    st.lists(st.integers(0, 59), max_size=3),
)
def test_plan_keeps_a_range_that_can_be_rebuilt(count: int, every: int, keep: int, applied: list[int]) -> None:
    versions = list(range(count))
    applied = [version for version in applied if version < count]
    plan = plan_gc(versions, versions[::every], applied, keep)
    kept = [version for version in versions if version not in plan.versions]
    assert kept == list(range(plan.keep_from, count))
    assert plan.keep_from % every == 0
    assert set(applied) <= set(kept)
    assert len(kept) >= min(keep, count)
    needed = min([*applied, max(0, count - keep)])
    assert needed - plan.keep_from < every, "nothing is kept without a reason"


def island(applied: int | None, age_s: float = 0.0, state: str = "ready") -> IslandRecord:
    now = time.time()
    return IslandRecord.model_validate(
        {
            "island_id": f"i{applied}",
            "url": "",
            "state": state,
            "applied": applied,
            "started_at": now,
            "heartbeat_at": now - age_s,
            "interval_s": 2.0,
        }
    )


def test_gc_deletes_what_nobody_needs(store: Store) -> None:
    publish(store, 12)
    before = store.list("")
    dry = gc(store, RUN, 2, dry_run=True)
    assert store.list("") == before
    report = gc(store, RUN, 2)
    assert report.plan == dry.plan
    assert report.plan.keep_from == 8
    assert report.blobs == dry.blobs > 0
    assert VersionReader(store, RUN).versions() == [8, 9, 10, 11]
    assert store.children(f"{RUN}/blobs/") == ["10", "11", "8", "9"]
    assert verify_board(store, RUN).ok
    assert VersionReader(store, RUN).files() == FILES
    publisher(store).publish(12, 12, state_of(12))
    assert VersionReader(store, RUN).head() == 12


def test_a_live_island_holds_its_chain_and_a_lost_one_does_not(store: Store) -> None:
    publish(store, 12)
    ledger = Ledger(store, RUN)
    for record in (island(5), island(1, age_s=60), island(2, state="failed"), island(None, state="starting")):
        ledger.heartbeat(record)
    report = gc(store, RUN, 1)
    assert report.plan.keep_from == 4
    assert "island serves version 5" in report.plan.reason
    assert verify_board(store, RUN).ok


class Dies(MemoryStore):
    left = 10**9

    def delete(self, key: str) -> None:
        if self.left == 0:
            raise BoardError("the machine went away")
        self.left -= 1
        super().delete(key)


@pytest.mark.parametrize("left", range(0, 21, 3))
def test_an_interrupted_gc_leaves_a_valid_board_and_is_finished_by_the_next(left: int) -> None:
    store = Dies()
    publish(store, 12)
    expected = MemoryStore()
    publish(expected, 12)
    gc(expected, RUN, 2)
    store.left = left
    with pytest.raises(BoardError, match="went away"):
        gc(store, RUN, 2)
    reader = VersionReader(store, RUN)
    assert {10, 11} <= set(reader.versions())
    for version in reader.versions():
        reader.materialise(version)
    store.left = 10**9
    gc(store, RUN, 2)
    shape = [key.rpartition("/")[0] for key in store.list("")]
    assert shape == [key.rpartition("/")[0] for key in expected.list("")]
    assert verify_board(store, RUN).ok


def test_orphans_of_an_interrupted_publish_go_but_those_in_flight_stay(store: Store) -> None:
    publish(store, 3)
    store.put(keys.blob(RUN, 2, "orphan"), b"x")
    store.put(keys.blob(RUN, 3, "inflight"), b"x")
    gc(store, RUN, 10)
    assert not store.exists(keys.blob(RUN, 2, "orphan"))
    assert store.exists(keys.blob(RUN, 3, "inflight"))


def test_gc_says_what_is_wrong(store: Store) -> None:
    with pytest.raises(BoardError, match="published no version"):
        gc(store, RUN, 3)
    with pytest.raises(BoardError, match="at least 1"):
        gc(store, RUN, 0)


def anchored(store: Store, checkpoints: list[int], taken: dict[int, int | None]) -> Ledger:
    """Twelve versions, fires at 2, 4, 6 with their sign maps and bases, and a map that no fire names beside each;
    `taken`: step -> the fire whose sign map it took."""
    publish(store, 12)
    ledger = Ledger(store, RUN)
    for step in (2, 4, 6):
        ledger.write_fire(make_fire(step, digest=f"s{step}", basis_digest=f"b{step}"))
        store.put(keys.sign_map(RUN, step, f"s{step}"), b"x")
        store.put(keys.sign_map(RUN, step, "orphan"), b"x")
        store.put(keys.bases(RUN, step, f"b{step}"), b"x")
    for step in checkpoints:
        ledger.write_checkpoint(CheckpointRecord(step=step, epoch=1, blobs={}, bytes=0, created_at=0.0))
    for step, fire in taken.items():
        ledger.write_step(make_step(step, sign_fire=fire))
    return ledger


@pytest.mark.parametrize(
    ("checkpoints", "taken", "kept"),
    [
        ([], {}, [2, 4, 6]),
        ([5, 8], {6: 4}, [4, 6]),
        ([5, 8], {6: 2}, [2, 4, 6]),  # the fire at 4 came late
        ([6], {}, [6]),
        ([7], {8: None}, [6]),  # M had no direction
        ([1], {2: None}, [2, 4, 6]),
    ],
)
def test_the_sign_maps_stay_that_a_resumed_run_takes(
    store: Store, checkpoints: list[int], taken: dict[int, int | None], kept: list[int]
) -> None:
    anchored(store, checkpoints, taken)
    under_way = keys.sign_map(RUN, 8, "not-committed")
    store.put(under_way, b"x")
    gc(store, RUN, 12)
    assert store.list(keys.sign_maps(RUN)) == [*(keys.sign_map(RUN, step, f"s{step}") for step in kept), under_way]
    assert store.list(keys.all_bases(RUN)) == [keys.bases(RUN, step, f"b{step}") for step in kept]
