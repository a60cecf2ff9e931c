"""Reasons for an island to end by itself, so that no machine is paid for nothing: its fleet wants it no more, it has
had nothing to do for long, or the process that started it is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable

from sprawl.board.fleet_log import FleetLog, wants
from sprawl.errors import SprawlError
from sprawl.rollout.service import Service

log = logging.getLogger(__name__)

LOOK_S = 5.0  # a read of one key that is mostly missing


def stop_at_signals(stop: asyncio.Event) -> None:
    """Let SIGTERM and SIGINT set `stop`; a second one does not wait for draining."""
    loop = asyncio.get_running_loop()

    def told(number: int) -> None:
        stop.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number)


async def until_unwanted(fleet: FleetLog, island_id: str, look_s: float = LOOK_S) -> str:
    """Return why, once the run's fleet says that this island is to end. A board that does not answer says nothing."""
    while True:
        try:
            record = await asyncio.to_thread(fleet.head)
        except (SprawlError, OSError) as error:
            log.warning("the fleet's log: %s", error)
        else:
            if not wants(record, island_id):
                assert record is not None, "without a record every island is wanted"
                return f"the fleet {'is closed' if record.state == 'closed' else 'needs it no more'} ({record.reason})"
        await asyncio.sleep(look_s)


async def until_idle(service: Callable[[], Service | None], seconds: float, look_s: float = 1.0) -> str:
    """Return once the island has had no request and no new version for so long. Before it serves it is not idle."""
    since, before = time.monotonic(), (0, 0)
    while True:
        current = service()
        if current is None:
            since = time.monotonic()
        else:
            now = (sum(current.counters.waits.counts), current.reconciler.versions_applied)
            if now != before or current.held:
                since, before = time.monotonic(), now
            elif time.monotonic() - since > seconds:
                return f"nothing to do for {seconds:.0f} s"
        await asyncio.sleep(min(look_s, seconds / 4))


async def until_orphaned(parent: int) -> str:
    """Return once `parent` is not this process's parent any more."""
    while os.getppid() == parent:
        await asyncio.sleep(1.0)
    return "the process that started it is gone"
