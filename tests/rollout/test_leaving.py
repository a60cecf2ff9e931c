"""Why an island ends by itself, and that it drains and leaves the board within a bound when it does."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sprawl.board.fleet_log import FleetLog, FleetRecord, Order, wants
from sprawl.board.ledger import wait_for_run
from sprawl.board.store import MemoryStore
from sprawl.errors import BoardError
from sprawl.rollout.leaving import until_idle, until_unwanted
from tests.rollout.processes import DiskRun, command, process, wait_for

BOUND_S = 60.0  # of a drain without requests, on a machine that is busy; the island's own limit is 30 s


def decision(**islands: str) -> FleetRecord:
    orders = {name.replace("_", "-"): Order(do=do, since=0.0) for name, do in islands.items()}  # type: ignore[arg-type]
    return FleetRecord(number=0, state="open", at=0.0, nonce="", target=1, islands=orders)


def test_who_is_wanted() -> None:
    assert wants(None, "a")
    assert wants(decision(island_0="run"), "island-0")
    assert wants(decision(island_0="run"), "by-hand")
    assert not wants(decision(island_0="drain"), "island-0")
    assert not wants(decision().model_copy(update={"state": "closed"}), "by-hand")


def test_an_island_hears_of_its_end_from_the_board() -> None:
    async def scenario() -> None:
        fleet = FleetLog(MemoryStore(), "r")
        waiting = asyncio.ensure_future(until_unwanted(FleetLog(fleet.store, "r"), "island-0", 0.01))
        for record in (decision(island_0="run"), decision(island_0="run", island_1="drain")):
            assert fleet.append(record)
            await asyncio.sleep(0.05)
            assert not waiting.done()
        fleet.append(decision(island_0="drain"))
        assert "needs it no more" in await asyncio.wait_for(waiting, 20)

    asyncio.run(scenario())


def test_a_board_that_does_not_answer_ends_nothing() -> None:
    class Silent(FleetLog):
        answers = 0

        def head(self) -> FleetRecord | None:
            self.answers += 1
            if self.answers < 3:
                raise BoardError("away")
            return super().head()

    async def scenario() -> None:
        fleet = Silent(MemoryStore(), "r")
        FleetLog(fleet.store, "r").close("reaped")
        assert "is closed (reaped)" in await asyncio.wait_for(until_unwanted(fleet, "x", 0.01), 20)
        assert fleet.answers == 3

    asyncio.run(scenario())


def test_idle_is_no_request_and_no_version() -> None:
    async def scenario() -> None:
        service = SimpleNamespace(
            counters=SimpleNamespace(waits=SimpleNamespace(counts=[0])),
            reconciler=SimpleNamespace(versions_applied=0),
            held=0,
        )
        current: list[SimpleNamespace | None] = [None]
        waiting = asyncio.ensure_future(until_idle(lambda: current[0], 0.2, 0.01))  # type: ignore[arg-type]
        await asyncio.sleep(0.5)
        assert not waiting.done()  # not in service yet
        current[0] = service
        for _ in range(4):
            service.counters.waits.counts[0] += 1
            await asyncio.sleep(0.1)
            assert not waiting.done()
        service.held = 1
        await asyncio.sleep(0.5)
        assert not waiting.done()
        service.held = 0
        assert "nothing to do" in await asyncio.wait_for(waiting, 20)

    asyncio.run(scenario())


def test_a_run_may_come_later(tmp_path: Path) -> None:
    store = MemoryStore()
    with pytest.raises(BoardError):
        wait_for_run(store, "r", 0.05, poll_s=0.01)
    run = DiskRun(tmp_path / "runs")
    assert wait_for_run(run.store, "latest", 0.0) == run.run_id


@pytest.mark.slow
def test_an_island_leaves_when_its_fleet_is_closed_and_when_a_signal_says_so(tmp_path: Path) -> None:
    """One island hears it from the board, the other by SIGTERM before there is any version to serve."""
    run = DiskRun(tmp_path / "runs")
    log = tmp_path / "log"
    url = "http://203.0.113.5:8300"
    with process(command(run, "--island-id", "early"), log) as early:
        wait_for(lambda: [r for r in run.ledger.islands() if r.state == "starting"], log)
        early.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert early.wait(BOUND_S) == 0
        assert run.ledger.islands() == []
        assert time.monotonic() - began < BOUND_S
    run.publish()
    with process(command(run, "--island-id", "island-0", "--obey-fleet", "--advertise-url", url), log) as island:
        ready = wait_for(lambda: [r for r in run.ledger.islands() if r.state == "ready"], log)[0]
        assert ready.url == url  # where others reach it, not where it listens
        FleetLog(run.store, run.run_id).close("the run has ended")
        assert island.wait(BOUND_S) == 0
        assert run.ledger.islands() == []
        assert "the fleet is closed (the run has ended)" in log.read_text()
