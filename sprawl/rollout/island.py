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
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from sprawl.board.ledger import Ledger, resolve_run
from sprawl.board.reader import VersionReader
from sprawl.board.records import IslandRecord, RunRecord
from sprawl.board.signing import environment_trust
from sprawl.board.store import open_store
from sprawl.errors import BoardError, SprawlError
from sprawl.policy.tokenizer import Tokenizer
from sprawl.rollout.gate import Gate
from sprawl.rollout.listen import IslandSettings, base_url
from sprawl.rollout.reconciler import Follow, Reconciler
from sprawl.rollout.server import Server
from sprawl.rollout.service import Service
from sprawl.rollout.sidecar import build_app
from sprawl.rollout.torch_engine import TorchEngine

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
LOOK_S = 0.2  # how often a change of state is noticed and written at once
DRAIN_S = 30.0
LINGER_S = 5.0
FAILED = 3


def run_island(settings: IslandSettings, listener: socket.socket, parent: int, say: Callable[[str], None]) -> int:
    """Serve on `listener` (see `sprawl.rollout.listen.bind`) until SIGTERM or SIGINT; returns the exit code.

    `parent` is the process that started this one, as it was at the start. Raises BoardError when there is no such run.
    """
    try:
        store = open_store(settings.board)
        run_id = resolve_run(store, settings.run_id or "latest")
        ledger = Ledger(store, run_id)
        reader = VersionReader(store, run_id, trust=environment_trust())
        island = Island(settings, ledger, ledger.run(), reader, listener, say)
        return asyncio.run(island.run(parent))
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

    def __post_init__(self) -> None:
        self.island_id = self.settings.island_id or f"island-{secrets.token_hex(3)}"
        self.url = base_url(self.settings, self.listener)
        self._stop = asyncio.Event()

    async def run(self, parent: int) -> int:
        self._catch_signals()
        tasks = [asyncio.ensure_future(self._heartbeats())] if self.settings.registered else []
        if self.settings.exit_with_parent:
            tasks.append(asyncio.ensure_future(self._watch_parent(parent)))
        try:
            if not await self._wait_for_first_version():
                return 0
            return await self._serve(await self._assemble())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
        rollout = self.record.config.get("rollout", {})
        settings = self.settings
        torch.set_num_threads(settings.threads or self.record.config.get("threads", {}).get("island", 1))
        files = await asyncio.to_thread(self.reader.files)
        tokenizer = Tokenizer.from_files(files)
        dtype = settings.compute_dtype or rollout.get("compute_dtype", "float32")
        engine = await asyncio.to_thread(TorchEngine.from_files, files, tokenizer, compute_dtype=dtype)
        wake = asyncio.Event()
        gate = Gate(settings.commit_mode, wake, run_id=self.record.run_id)
        follow: Follow = settings.follow or rollout.get("follow", "eager")
        poll_s = 1.0 if _is_remote(settings.board) else 0.2
        reconciler = Reconciler(self.reader, engine, gate, follow=follow, wake=wake, poll_s=poll_s)
        self.service = Service(
            island_id=self.island_id,
            run_id=self.record.run_id,
            engine=engine,
            gate=gate,
            reconciler=reconciler,
            tokenizer=tokenizer,
            max_wait_s=settings.max_wait_s,
            max_active=settings.max_requests,
            files=files,
        )
        return self.service

    async def _serve(self, service: Service) -> int:
        app = build_app(service, token=self.settings.token)
        server = Server(app, service.connections, tls_cert=self.settings.tls_cert, tls_key=self.settings.tls_key)
        serving = asyncio.ensure_future(server.serve(sockets=[self.listener]))
        following = asyncio.ensure_future(service.reconciler.run())
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
        if not self.settings.registered:
            return
        try:
            await asyncio.to_thread(self.ledger.remove_island, self.island_id)
        except (SprawlError, OSError) as error:
            log.warning("the island's record was not removed: %s", error)

    # --- asked to stop ---

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            self._stop.set()
            loop.remove_signal_handler(number)  # a second signal does not wait for draining

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)

    async def _watch_parent(self, parent: int) -> None:
        while os.getppid() == parent:
            await asyncio.sleep(1.0)
        self.say(f"{self.island_id}: the process that started it is gone")
        self._stop.set()


def _is_remote(board: str) -> bool:
    scheme, separator, _ = board.partition("://")
    return bool(separator) and scheme not in ("file", "local", "memory")
