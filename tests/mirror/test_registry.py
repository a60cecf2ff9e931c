"""Which mirrors a reader asks, and in which order."""

import time

from sprawl.board import keys
from sprawl.board.ledger import list_runs
from sprawl.board.records import MirrorRecord
from sprawl.board.store import MemoryStore, Store
from sprawl.mirror.registry import discover, forget_lost, mirrors, register, unregister


def record(region: str, mirror_id: str, age_s: float = 0.0) -> MirrorRecord:
    at = time.time() - age_s
    return MirrorRecord(
        mirror_id=mirror_id, region=region, url="http://x", started_at=at, heartbeat_at=at, interval_s=5.0
    )


def orders(board: Store, region: str) -> set[tuple[str, ...]]:
    """Over many readers."""
    return {tuple(r.mirror_id for r in discover(board, region, str(reader))) for reader in range(60)}


def test_own_region_first_and_spread() -> None:
    board = MemoryStore()
    for region, mirror_id in (("east", "a"), ("east", "c"), ("west", "b"), ("south", "d")):
        register(board, record(region, mirror_id))
    assert orders(board, "east") == {("a", "c"), ("c", "a")}
    assert orders(board, "west") == {("b",)}
    elsewhere = orders(board, "north")  # none there: two others, not all of them
    assert {len(order) for order in elsewhere} == {2}
    assert {mirror_id for order in elsewhere for mirror_id in order} == {"a", "b", "c", "d"}
    assert discover(board, "east", "me") == discover(board, "east", "me")


def test_lost_ones_and_nonsense_are_left_out() -> None:
    board = MemoryStore()
    register(board, record("east", "a", age_s=16))
    register(board, record("east", "c", age_s=14))
    board.put(keys.mirror("east", "odd"), b"{not json")
    board.put(
        keys.mirror("east", "newer"), record("east", "x").model_dump_json().replace('"format":1', '"format":9').encode()
    )
    assert orders(board, "east") == {("c",)}
    assert [r.mirror_id for r in mirrors(board)] == ["c"]
    register(board, record("east", "old", age_s=7200))
    register(board, record("west", "old", age_s=7200))
    forget_lost(board, "east")
    assert board.children(".mirrors/east/") == ["a.json", "c.json", "newer.json", "odd.json"]
    assert board.children(".mirrors/west/") == ["old.json"]
    unregister(board, record("east", "c"))
    assert orders(board, "east") == {()}
    assert list_runs(board) == []
