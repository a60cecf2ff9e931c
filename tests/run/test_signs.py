"""Which sign map a step uses."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3

from sprawl.anchor import signmap
from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.records import FireRecord
from sprawl.board.store import MemoryStore
from sprawl.config import AnchorConfig
from sprawl.errors import IntegrityError, SprawlError
from sprawl.run.signs import SignMaps

SHAPES = {"w": (3,)}


class Board:
    def __init__(self) -> None:
        self.store = MemoryStore("signs")
        self.ledger = Ledger(self.store, "run")

    def fire(self, step: int, values: list[float], damage: bool = False, direction: bool = True) -> int:
        data = signmap.encode_signs({"w": torch.tensor(values)}, step)
        digest = blake3(data).hexdigest()
        self.store.put(keys.sign_map("run", step, digest), data[:-1] if damage else data)
        self.ledger.write_fire(
            FireRecord(
                step=step,
                newest_step=step - 20,
                checkpoints=[step - 20],
                forecast="stale",
                replayed_step=step,
                digest=digest,
                bytes=len(data),
                header_bytes=signmap.HEADER_BYTES,
                parameters=3,
                grad_norm=1.0,
                loss=0.0,
                has_direction=direction,
                seconds=0.1,
                finished_at=0.0,
            )
        )
        return len(data)

    def maps(self, **settings: object) -> SignMaps:
        return SignMaps(self.store, self.ledger, AnchorConfig.model_validate(settings), SHAPES, "see the log")


def never() -> None:
    raise AssertionError("nothing should be waited for")


def test_a_map_is_used_from_the_step_after_its_fire() -> None:
    board = Board()
    size = board.fire(20, [1, -1, 1])
    maps = board.maps()
    assert maps.take(20, never) == 0
    assert maps.signs is None
    assert maps.take(21, never) == size
    assert maps.signs is not None
    assert maps.signs["w"].tolist() == [True, False, True]
    assert maps.take(22, never) == 0  # held between fires, received once
    assert maps.fire == 20
    assert maps.weights_step == 0  # of the newest weights behind it


def test_without_blocking_a_late_map_is_taken_when_it_comes() -> None:
    board = Board()
    board.fire(20, [1, 1, 1])
    maps = board.maps()
    maps.take(21, never)
    assert maps.take(41, never) == 0
    assert maps.fire == 20
    board.fire(40, [-1, -1, -1])
    assert maps.take(45, never) > 0
    assert maps.fire == 40


def test_a_missed_map_is_skipped_for_a_newer_one() -> None:
    board = Board()
    maps = board.maps()
    for step in (20, 40, 60):
        board.fire(step, [1, 1, 1])
    maps.take(67, never)
    assert maps.fire == 60


def test_a_fire_brought_forward_is_used_and_waited_for_like_a_regular_one() -> None:
    board = Board()
    maps = board.maps(blocking=True)
    for step in (20, 30):
        board.fire(step, [1, 1, 1])
    maps.requested = [30]
    maps.take(30, never)
    assert maps.fire == 20
    maps.take(31, never)
    assert maps.fire == 30
    late = board.maps()
    late.requested = [30, 50]
    late.take(55, never)
    assert late.fire == 30  # neither 40 nor 50 is there yet


def test_blocking_waits_for_the_due_fire_and_watches_the_processes_meanwhile() -> None:
    board = Board()
    maps = board.maps(blocking=True)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            board.fire(20, [1, 1, -1])

    assert maps.take(21, look) > 0
    assert looks >= 2


def test_blocking_gives_up_with_a_hint() -> None:
    maps = Board().maps(blocking=True, timeout_s=0.1)
    with pytest.raises(SprawlError, match=r"did not fire for step 20 .*see the log"):
        maps.take(21, lambda: None)


def test_without_a_direction_nothing_is_corrected() -> None:
    board = Board()
    board.fire(20, [0, 0, 0], direction=False)
    board.fire(40, [1, 0, -1])
    maps = board.maps()
    assert maps.take(21, never) > 0
    assert (maps.fire, maps.signs) == (20, None)
    maps.take(41, never)
    assert maps.signs is not None
    assert maps.signs["w"].tolist() == [True, True, False]


def test_checkpoints_that_the_anchor_still_reads() -> None:
    board = Board()
    maps = board.maps()
    assert maps.checkpoints_needed(60) == {0, 20, 40}
    for step in (20, 40):
        board.fire(step, [1, 1, 1])
    assert maps.checkpoints_needed(60) == {20, 40}
    board.fire(60, [1, 1, 1])
    assert maps.checkpoints_needed(60) == set()
    assert board.maps(enabled=False).checkpoints_needed(60) == set()


def test_disabled_anchor_is_never_asked() -> None:
    board = Board()
    board.fire(20, [1, 1, 1])
    maps = board.maps(enabled=False)
    assert maps.take(21, never) == 0
    assert maps.signs is None


def test_replay_uses_the_recorded_fire_and_finds_damage() -> None:
    board = Board()
    board.fire(20, [1, 1, 1])
    board.fire(40, [1, 1, 1], damage=True)
    maps = board.maps()
    maps.use(20)
    maps.use(None)
    assert maps.signs is None
    with pytest.raises(IntegrityError, match="fire 40"):
        maps.use(40)
    with pytest.raises(SprawlError, match="fire 60 is gone"):
        maps.use(60)
