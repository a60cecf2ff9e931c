"""An island as one process: embedded engine, gate, reconciler and sidecar, registered on the board by a heartbeat.

The process ends with 0 when it was asked to stop (it drains first) and with `FAILED` when it can no longer vouch for
its weights: it then shows /health 503 and a `failed` heartbeat for a while, so that somebody can look, and leaves the
rest to whoever supervises it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sprawl.board.fleet_log import FleetLog
from sprawl.board.ledger import Ledger, wait_for_run
from sprawl.board.reader import VersionReader
from sprawl.board.records import IslandRecord, RunRecord
from sprawl.board.signing import environment_trust
from sprawl.board.store import open_store
from sprawl.errors import BoardError, SprawlError
from sprawl.mirror.store import MirroredStore, through_mirrors
from sprawl.rollout.assembly import Parts, assemble
from sprawl.rollout.engines import work_directory
from sprawl.rollout.gate import Gate
from sprawl.rollout.leaving import stop_at_signals, until_idle, until_orphaned, until_unwanted
from sprawl.rollout.listen import IslandSettings, base_url
from sprawl.rollout.reconciler import Reconciler, Takeover
from sprawl.rollout.runs import RunWatcher
from sprawl.rollout.server import Server
from sprawl.rollout.service import Service
from sprawl.rollout.sidecar import build_app

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
LOOK_S = 0.2  # how often a change of state is noticed and written at once
DRAIN_S = 30.0
LINGER_S = 5.0
RUN_LOOK_S = 5.0  # how often newer runs are looked for: a listing of the board
FAILED = 3


def run_island(
    settings: IslandSettings,
    listener: socket.socket,
    parent: int,
    say: Callable[[str], None],
    closed: Callable[[int], None] = lambda code: None,
) -> int:
    """Serve on `listener` (see `sprawl.rollout.listen.bind`) until SIGTERM or SIGINT; returns the exit code.

    `parent` is the process that started this one, as it was at the start. `closed` is told the exit code when the
    island has left; a download that is still under way in a thread is waited for after that. Raises BoardError when
    there is no such run.
    """

    async def serve(island: Island) -> int:
        code = await island.run(parent)
        closed(code)
        return code

    try:
        store = open_store(settings.board)
        run_id = wait_for_run(store, settings.run_id or "latest", settings.wait_for_run_s)
        ledger = Ledger(store, run_id)
        trust = environment_trust()
        reader = VersionReader(through_mirrors(store, settings.region, trust), run_id, trust=trust)
        island = Island(settings, ledger, ledger.run(), reader, listener, say)
        with work_directory(settings, run_id) as directory:
            island.work_dir = directory
            return asyncio.run(serve(island))
    finally:
        listener.close()


@dataclass
class Island:
    """One life of an island, from waiting for the first version to the end of draining."""

    settings: IslandSettings
    ledger: Ledger
    record: RunRecord
    reader: VersionReader
    listener: socket.socket
    say: Callable[[str], None]
    started_at: float = field(default_factory=time.time)
    service: Service | None = None
    draining: bool = False
    work_dir: Path = field(default_factory=Path)

    def __post_init__(self) -> None:
        self.island_id = self.settings.island_id or f"island-{secrets.token_hex(3)}"
        self.url = base_url(self.settings, self.listener)
        self._stop = asyncio.Event()
        self._parts: Parts | None = None
        self._left: list[Ledger] = []  # of runs that this island is still registered with

    async def run(self, parent: int) -> int:
        stop_at_signals(self._stop)
        tasks = [asyncio.ensure_future(self._heartbeats())] if self.settings.registered else []
        tasks += [asyncio.ensure_future(self._stop_for(reason)) for reason in self._reasons_to_leave(parent)]
        try:
            if not await self._wait_for_first_version():
                return 0
            return await self._serve(await self._assemble())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if isinstance(self.reader.store, MirroredStore):
                self.reader.store.close()

    async def _wait_for_first_version(self) -> bool:
        """True once the run has a version; False when asked to stop before."""
        said = False
        while not self._stop.is_set():
            try:
                if await asyncio.to_thread(self.reader.head) is not None:
                    return True
            except BoardError as error:
                log.warning("%s", error)
            if not said:
                self.say(f"run {self.record.run_id} has no version yet; waiting for version 0")
                said = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._stop.wait()
        await self._unregister()
        return False

    async def _assemble(self) -> Service:
        settings = self.settings
        parts = await asyncio.to_thread(assemble, settings, self.record, self.reader, self.work_dir, own=True)
        wake = asyncio.Event()
        if isinstance(self.reader.store, MirroredStore):
            self.reader.store.notify = partial(asyncio.get_running_loop().call_soon_threadsafe, wake.set)
        gate = Gate(settings.commit_mode, wake, run_id=self.record.run_id)
        self.service = Service(
            island_id=self.island_id,
            run_id=self.record.run_id,
            engine=parts.equipment.engine,
            gate=gate,
            reconciler=self._reconciler(parts, gate, None),
            tokenizer=parts.tokenizer,
            max_wait_s=settings.max_wait_s,
            max_active=settings.max_requests,
            files=dict(parts.files),
        )
        self._parts = parts
        return self.service

    def _reconciler(self, parts: Parts, gate: Gate, takeover: Takeover | None) -> Reconciler:
        return Reconciler(
            parts.reader,
            parts.equipment.engine,
            gate,
            follow=parts.follow,
            wake=gate.wake,
            poll_s=parts.poll_s,
            copy=parts.equipment.copy,
            takeover=takeover,
        )

    async def _serve(self, service: Service) -> int:
        app = build_app(service, token=self.settings.token)
        server = Server(app, service.connections, tls_cert=self.settings.tls_cert, tls_key=self.settings.tls_key)
        serving = asyncio.ensure_future(server.serve(sockets=[self.listener]))
        following = asyncio.ensure_future(self._follow(service))
        stopping = asyncio.ensure_future(self._stop.wait())
        where = "registered on the board" if self.settings.registered else "not registered"
        self.say(
            f"{self.island_id} serves run {service.run_id} at {self.url} "
            f"({service.reconciler.follow}, {service.gate.state.mode}, {where})"
        )
        try:
            await asyncio.wait({serving, following, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()  # the server ended by itself: say why
                raise SprawlError(f"the HTTP server at {self.url} ended unexpectedly")
            if not stopping.done():
                following.result()
                self.say(f"{self.island_id} failed: {service.reconciler.terminal_error}")
                await asyncio.wait({stopping}, timeout=LINGER_S)
                return FAILED
            await self._drain(service)
            return 0
        finally:
            following.cancel()
            stopping.cancel()
            server.should_exit = True
            await asyncio.gather(serving, following, stopping, return_exceptions=True)
            await service.engine.close()
            if self._parts is not None:
                await self._parts.equipment.engine.close()  # another one while a change of runs is under way
                self._parts.equipment.copy.close()

    # --- which run ---

    async def _follow(self, service: Service) -> None:
        """Keep the reconciler going, for one run after the other. Returns when it ended by itself."""
        watcher = None
        if self.settings.follow_latest_run:
            watcher = RunWatcher(self.ledger.store, self.record, environment_trust())
        following = asyncio.ensure_future(service.reconciler.run())
        try:
            while watcher is not None and not following.done():
                await asyncio.wait({following}, timeout=RUN_LOOK_S)
                newer = await asyncio.to_thread(watcher.look)
                if newer is None or following.done():
                    continue
                service.reconciler.stop()
                await following
                if service.reconciler.terminal_error is None and service.gate.state.closed is None:
                    await self._go_over(service, newer, watcher)
                    following = asyncio.ensure_future(service.reconciler.run())
            await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _go_over(self, service: Service, record: RunRecord, watcher: RunWatcher) -> None:
        """Let another run's first version take the place of what is served. Until it does, nothing changes but who
        follows the board; the run left behind is not followed any more."""
        assert self._parts is not None
        before = self._parts
        reader = VersionReader(self.reader.store, record.run_id, trust=environment_trust())
        before.equipment.copy.close()  # its directory is the next one's; what it holds can still be read
        try:
            parts = await asyncio.to_thread(assemble, self.settings, record, reader, self.work_dir, own=False)
        except SprawlError as error:
            log.warning("run %s cannot be served here, %s is: %s", record.run_id, self.record.run_id, error)
            watcher.postpone(record.run_id)
            return

        async def hand_over() -> None:
            await service.engine.close()
            service.engine, service.tokenizer = parts.equipment.engine, parts.tokenizer
            service.files, service.run_id = dict(parts.files), record.run_id
            self._left.append(self.ledger)
            self.ledger, self.record, self.reader = Ledger(self.ledger.store, record.run_id), record, reader
            self.say(f"{self.island_id} serves run {record.run_id} from now on")

        if before.equipment.engine is not service.engine:
            await before.equipment.engine.close()  # that of a run that was never taken over
        self._parts, watcher.current = parts, record
        service.reconciler = self._reconciler(parts, service.gate, Takeover(record.run_id, hand_over))
        self.say(f"{self.island_id} goes over to run {record.run_id}")

    async def _drain(self, service: Service) -> None:
        """Refuse what is new, finish what is running, then leave the board."""
        self.draining = True
        service.gate.close("this island is draining")
        self.say(f"{self.island_id} drains: {service.gate.active} requests in flight")
        await self._beat()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await service.gate.idle()
        await self._unregister()

    # --- the board ---

    def heartbeat(self) -> IslandRecord:
        """What the board should say about this island now."""
        service = self.service
        return IslandRecord(
            island_id=self.island_id,
            url=self.url,
            state=self._state(),
            applied=service.gate.version if service else None,
            started_at=self.started_at,
            heartbeat_at=time.time(),
            interval_s=HEARTBEAT_S,
            pid=os.getpid(),
            versions_applied=service.reconciler.versions_applied if service else 0,
            versions_verified=service.reconciler.versions_verified if service else 0,
            last_error=service.reconciler.last_error if service else None,
        )

    def _state(self) -> Literal["starting", "ready", "draining", "failed"]:
        if self.draining or self._stop.is_set():
            return "draining"
        if self.service is None:
            return "starting"
        if self.service.reconciler.terminal_error is not None:
            return "failed"
        return "ready" if self.service.ready else "starting"

    async def _heartbeats(self) -> None:
        """Every `HEARTBEAT_S`, and at once when the state or the version changed."""
        written: tuple[Any, ...] = ()
        written_at = float("-inf")
        while not self.draining:
            while self._left:
                await self._remove_record(self._left.pop())
            record = self.heartbeat()
            now = (record.state, record.applied, record.last_error)
            if now != written or time.monotonic() >= written_at + HEARTBEAT_S:
                await self._beat()
                written, written_at = now, time.monotonic()
            await asyncio.sleep(LOOK_S)

    async def _beat(self) -> None:
        if not self.settings.registered:
            return
        try:
            await asyncio.to_thread(self.ledger.heartbeat, self.heartbeat())
        except (SprawlError, OSError) as error:
            log.warning("heartbeat not written: %s", error)  # serving goes on; the next one may get through

    async def _unregister(self) -> None:
        self.draining = True
        for ledger in (self.ledger, *self._left):
            await self._remove_record(ledger)

    async def _remove_record(self, ledger: Ledger) -> None:
        if not self.settings.registered:
            return
        try:
            await asyncio.to_thread(ledger.remove_island, self.island_id)
        except (SprawlError, OSError) as error:
            log.warning("the island's record was not removed: %s", error)

    # --- asked to stop ---

    def _reasons_to_leave(self, parent: int) -> list[Coroutine[Any, Any, str]]:
        settings, reasons = self.settings, list[Coroutine[Any, Any, str]]()
        if settings.exit_with_parent:
            reasons.append(until_orphaned(parent))
        if settings.obey_fleet:
            reasons.append(until_unwanted(FleetLog(self.ledger.store, self.record.run_id), self.island_id))
        if settings.exit_when_idle is not None:
            reasons.append(until_idle(lambda: self.service, settings.exit_when_idle))
        return reasons

    async def _stop_for(self, reason: Coroutine[Any, Any, str]) -> None:
        self.say(f"{self.island_id}: {await reason}")
        self._stop.set()
