"""The simulation against what can be worked out by hand."""

import statistics

import pytest

from benchmarks.fanout_model import Clock, Link, Measured, Prices, World, direct, mirrored, outcomes

FAST = Measured(0.0, 0.0, 0.0, 1e9, 1e12)


def finish_times(capacity: float, transfers: list[tuple[float, float, float]]) -> list[float]:
    """Of transfers (start, bytes, own limit) over one link."""
    clock, times = Clock(), [0.0] * len(transfers)
    link = Link(clock, capacity)
    for number, (start, size, limit) in enumerate(transfers):

        def done(number: int = number) -> None:
            times[number] = clock.now

        clock.at(start, lambda size=size, limit=limit, done=done: link.send(size, limit, done))
    clock.run()
    return times


def test_a_link_is_shared_fairly() -> None:
    assert finish_times(100, [(0, 1000, 1e9)]) == pytest.approx([10])
    assert finish_times(100, [(0, 1000, 1e9)] * 4) == pytest.approx([40] * 4)
    assert finish_times(100, [(0, 1000, 20)]) == pytest.approx([50])
    # The one that may only take 20 leaves 80 to the other.
    assert finish_times(100, [(0, 1000, 20), (0, 800, 1e9)]) == pytest.approx([50, 10])
    # Alone for 5 s, then half each: 500 left at 50; the second has 500 left when the first is done.
    assert finish_times(100, [(0, 1000, 1e9), (5, 1000, 1e9)]) == pytest.approx([15, 20])


def test_many_transfers_use_the_link_to_the_full() -> None:
    transfers = [(0.01 * n, 500.0 + n, 1e9 if n % 2 else 50.0) for n in range(300)]
    total = sum(size for _, size, _ in transfers)
    assert max(finish_times(100, transfers)) == pytest.approx(total / 100, rel=0.01)


def test_polling_readers_wait_for_their_next_poll() -> None:
    world = World(round_trips_s=(0.0,), island_rate=1e12, board_rate=1e18)
    times = direct(FAST, world, 20_000, 1.0, seed=0)
    assert statistics.mean(times) == pytest.approx(0.5, abs=0.01)
    assert max(times) <= 1.0


def test_a_store_is_as_slow_as_its_link() -> None:
    world = World(round_trips_s=(0.0,), board_rate=1e9)
    assert max(direct(FAST, world, 100, 1e9, seed=0)) == pytest.approx(100, rel=0.02)


def test_a_mirror_fetches_once_and_then_sends() -> None:
    world = World(round_trips_s=(0.0, 0.1), stream_rate=1e8, mirror_link=1e9, island_rate=1e9, mirror_poll_s=0.0)
    times = mirrored(FAST, world, 200, 1e8, seed=0, per_region=1, signed=True)
    assert len(times) == 200
    # Two regions, 100 islands each: 10 s to send them all; the far one waits 1 s and some round trips for the delta.
    assert max(times) == pytest.approx(11.2, abs=0.1)
    halved = mirrored(FAST, world, 200, 1e8, seed=0, per_region=2, signed=True)
    assert max(halved) == pytest.approx(6.2, abs=0.1)


def test_dollars() -> None:
    rows = outcomes(FAST, islands=1200, sizes_mb=(500.0,), per_region=(1,), prices=Prices())
    alone, mirrors = rows
    assert alone.egress_gb == pytest.approx(550)  # 1,100 of 1,200 islands are outside the board's region
    assert (alone.inter_region, alone.internet) == pytest.approx((11.0, 49.5))
    assert alone.store_requests == 1200 * 61
    assert mirrors.egress_gb == pytest.approx(5.5)
    assert mirrors.internet == pytest.approx(0.495)
    assert mirrors.store_requests == 1200 * 5 + 12 * 241
    assert len({row.islands for row in rows}) == 1
