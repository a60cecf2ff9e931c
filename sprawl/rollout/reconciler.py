"""Brings an island's weights to the version it should serve: follows the board, one verified step at a time.

`targets` decides, purely; `Reconciler` does. Downloading, decoding, a first digest check and writing down what is to be
done happen outside the gate and touch nothing; patching, the check of what was patched and the engine's swap happen
inside. A failure before anything was touched is retried while the old version is served on. When the engine refuses a
version, the patch is undone, the engine begins anew with the old version, and the refused one is stepped over. Any
other failure is terminal, because nobody can vouch for the state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sprawl.errors import BoardError, IntegrityError, SprawlError
from sprawl.rollout.engine import Engine, EngineError
from sprawl.rollout.gate import CommitUndone, Gate, GateClosed, Rewind
from sprawl.rollout.host_copy import HostCopy, MemoryCopy
from sprawl.rollout.targets import Follow, next_target
from sprawl.rollout.wire import ServerState

if TYPE_CHECKING:
    from sprawl.board.manifest import Manifest
    from sprawl.board.reader import Prepared, Served, VersionReader

__all__ = ["Follow", "Reconciler", "Takeover", "next_target"]

log = logging.getLogger(__name__)

IDLE_LOOK_S = 5.0  # how often the head is looked up when nobody asks
STREAK = 4  # steps in a row after which it is looked up too: it may be far ahead
MAX_BACKOFF_S = 5.0
REBUILD_AFTER = 3  # failed preparations in a row before the whole state is rebuilt from a keyframe


@dataclass(frozen=True)
class Takeover:
    """The first version of another run replaces what the gate admits to. `hand_over` is called in that moment, with
    nothing in flight, before the engine takes its weights."""

    run_id: str
    hand_over: Callable[[], Awaitable[None]]


class Reconciler:
    """Owns the island's host copy of the served view and is the only one who changes the engine's weights.

    `state`, `latest_seen`, the errors and the counters are read by /server_info, /metrics and the heartbeat. `run` is
    the only task; `wake` (shared with the gate and /wake) cuts its naps short."""

    def __init__(
        self,
        reader: VersionReader,
        engine: Engine,
        gate: Gate,
        *,
        follow: Follow,
        wake: asyncio.Event,
        poll_s: float = 0.2,
        copy: HostCopy | None = None,
        takeover: Takeover | None = None,
    ) -> None:
        self.follow: Follow = follow
        self.state: ServerState = "IDLE"
        self.latest_seen: int | None = None
        self.versions_applied = 0
        self.versions_verified = 0
        self.last_error: str | None = None
        self.terminal_error: str | None = None
        self.pause_seconds = 0.0
        self.prepare_seconds = 0.0
        self._reader = reader
        self._engine = engine
        self._gate = gate
        self._wake = wake
        self._poll_s = poll_s
        self._copy: HostCopy = copy or MemoryCopy()
        self._takeover = takeover
        self._prepared: Prepared | None = None  # fetched, but there was no room to stage it
        self._stopping = False
        self._served: Served | None = None
        self._manifest: Manifest | None = None  # of what is served
        self._refused: tuple[int, str] | None = None  # the version that the engine would not take, and why
        self._failures = 0  # in a row, of any kind
        self._broken = 0  # of those, bytes that were not what a digest promised
        self._looked_at = float("-inf")
        self._streak = 0  # steps since there was nothing to do or the head was looked up

    def wake(self) -> None:
        """Look at the board now instead of at the next poll."""
        self._looked_at = float("-inf")
        self._wake.set()

    def stop(self) -> None:
        """Let `run` return once the step under way, if there is one, is done."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Until stopped, cancelled or terminally failed."""
        self._stopping = False
        while self.terminal_error is None and not self._stopping:
            self._wake.clear()
            nap = self._poll_s
            try:
                if await self._engine_fails():
                    return
                if await self.advance():
                    nap = 0.0
                self._failures, self._broken = 0, 0
                self.last_error = self._refused[1] if self._refused is not None else None
            except GateClosed:
                return
            except Exception as error:
                if self.terminal_error is not None:
                    return
                self.state = "IDLE"
                self._failures += 1
                self._broken += isinstance(error, IntegrityError)
                self.last_error = _describe(error)
                self._looked_at = float("-inf")  # what was known of the board may be what is wrong
                log.warning("still serving %s: %s", self._gate.version, self.last_error)
                # Not cut short by `wake`: a failing store must not turn demand into a busy loop.
                await asyncio.sleep(min(MAX_BACKOFF_S, self._poll_s * 2**self._failures))
                continue
            if nap:
                with suppress(TimeoutError):
                    async with asyncio.timeout(nap):
                        await self._wake.wait()

    async def advance(self) -> bool:
        """Put one version into service if there is one to put. True when something changed."""
        applied = self._served.version if self._served is not None else None
        idle = self.follow == "demand" and not self._gate.waiting and self._takeover is None
        if idle and time.monotonic() < self._looked_at + IDLE_LOOK_S:
            return False
        head = await self._head(applied)
        if self._takeover is not None:
            target = await self._first_target(head)
        else:
            target = next_target(self.follow, applied, head, self._gate.waiting)
        if self._refused is not None and target == self._refused[0]:
            target = target + 1 if head is not None and head > target else None
        if target is None or self._engine.trouble() is not None:
            self._streak = 0
            return False
        self._streak += 1
        if self._served is None:
            await self._materialise(target)
        elif self._broken >= REBUILD_AFTER:
            assert head is not None
            jump = await self._jump_target(self._served.version, head)
            log.warning("no way leads from version %s: rebuilding %s", applied, jump)
            await self._materialise(jump)
        elif await self._has(target):
            await self._patch(self._served, target)
        else:
            assert head is not None
            jump = await self._jump_target(self._served.version, head)
            log.warning("version %s is gone: going from %s to %s", target, applied, jump)
            await self._patch(self._served, jump)
        return True

    async def _head(self, applied: int | None) -> int | None:
        """Newest version worth knowing of. Following the chain costs one small read, a version that a request waits
        for another (retention may have cut the chain below it); the full look-up is for cold starts and for now and
        then."""
        now = time.monotonic()
        if applied is not None and now < self._looked_at + IDLE_LOOK_S and self._streak < STREAK:
            known = max(applied, self.latest_seen or 0)
            needed = min((p.lowest for p in self._gate.waiting if p.lowest > known), default=known + 1)
            for version in {known + 1, needed}:
                if await self._has(version):
                    known = max(known, version)
            self.latest_seen = known
        else:
            self._streak = 0
            self.latest_seen = await asyncio.to_thread(self._reader.head)
            if self.latest_seen is not None:
                self._looked_at = now
        return self.latest_seen

    async def _first_target(self, head: int | None) -> int | None:
        """Where to begin in another run. Versions that the waiting requests name are not its versions; a run that is
        followed on demand may still need its first."""
        if self.follow == "eager" or head is None:
            return head
        return min(await asyncio.to_thread(self._reader.versions), default=None)

    async def _jump_target(self, applied: int, head: int) -> int:
        """Where to go when the next step is gone: the lowest version a request waits for, if it is there, or head."""
        needed = [policy.lowest for policy in self._gate.waiting if applied < policy.lowest <= head]
        return min(needed) if needed and await self._has(min(needed)) else head

    async def _has(self, version: int) -> bool:
        return await asyncio.to_thread(self._reader.manifest, version) is not None

    async def _materialise(self, version: int) -> None:
        """Rebuild a whole state beside the one in service, then exchange them. A copy that a former life left makes the
        first one cheap."""
        started = time.monotonic()
        self.state = "FETCHING"
        manifest = await asyncio.to_thread(self._reader.manifest, version)
        if manifest is None:
            raise BoardError(f"version {version} is no longer on the board")
        build: Callable[[], Served] = partial(self._copy.commit, self._reader)
        left = await asyncio.to_thread(self._copy.open) if self._served is None else None
        if left is not None and left.version == version and left.root == manifest.root_digest:
            build = partial(_same, left)
        elif left is None or left.version >= version or not await self._stage_from(left, version):
            await asyncio.to_thread(self._copy.check_room, manifest.full_bytes)
            served = await asyncio.to_thread(self._reader.materialise, version)
            await asyncio.to_thread(self._copy.stage_whole, served)
        self.prepare_seconds += time.monotonic() - started
        await self._commit(manifest, build, None)
        log.info("version %s in service after %s bytes from the board", version, self._reader.bytes_read)

    async def _stage_from(self, left: Served, version: int) -> bool:
        """Stage the way from what a former life left. False when it is not of the chain that is on the board."""
        try:
            prepared = await asyncio.to_thread(self._reader.prepare, left, version)
            await asyncio.to_thread(self._copy.stage, self._reader, prepared)
        except IntegrityError as error:
            log.warning("version %s, which was here, leads nowhere: %s", left.version, error)
            return False
        return True

    async def _patch(self, served: Served, version: int) -> None:
        """Go on from what is served: decode against the intact base, then patch the host copy inside the gate."""
        from sprawl.board.reader import Prepared  # heavy, and this module is imported to check settings too
        from sprawl.delta.compose import inverse

        started = time.monotonic()
        self.state = "FETCHING"
        prepared = self._prepared
        if prepared is None or (prepared.version, prepared.base_root) != (version, served.root):
            prepared = self._prepared = await asyncio.to_thread(self._reader.prepare, served, version)
        assert self._manifest is not None
        back = Prepared(
            version=served.version,
            base_version=version,
            base_root=prepared.manifest.root_digest,
            manifest=self._manifest,
            overwrites=await asyncio.to_thread(inverse, served.state, prepared.overwrites),
            bytes=0,
        )
        # While the old version is still served: what does not give the published state is found before it is touched.
        try:
            await asyncio.to_thread(self._copy.stage, self._reader, prepared)
        except IntegrityError:
            self._prepared = None
            raise
        self._prepared = None
        self.prepare_seconds += time.monotonic() - started
        await self._commit(prepared.manifest, partial(self._copy.commit, self._reader), partial(self._undo, back))

    def _undo(self, back: Prepared) -> Served:
        self._copy.stage(self._reader, back)
        return self._copy.commit(self._reader)

    async def _commit(self, manifest: Manifest, build: Callable[[], Served], undo: Callable[[], Served] | None) -> None:
        """Take a version through the gate. `build` makes its state out of the host copy, which must have the published
        root digest then; `undo` takes the host copy back."""
        self.state = "STAGING"
        version = manifest.version

        async def install() -> None:
            self.state = "COMMITTING"
            before = dict(self._served.digests) if self._served is not None else None
            if self._takeover is not None:
                await self._takeover.hand_over()
            served = await asyncio.to_thread(build)
            _check(served, manifest)
            try:
                await self._exchange(served, before)
            except EngineError as error:
                if undo is None:
                    raise
                assert self._manifest is not None
                served = await asyncio.to_thread(undo)
                _check(served, self._manifest)
                await self._engine.load(served)
                self._served = served
                raise CommitUndone(f"version {version} is not served, {served.version} is: {error}") from error
            self._served, self._manifest, self._refused = served, manifest, None

        try:
            if self._takeover is None:
                await self._gate.commit(version, install)
            else:
                await self._gate.switch(self._takeover.run_id, version, install)
        except (GateClosed, Rewind):
            raise
        except CommitUndone as error:
            self._refused = version, str(error)
            raise
        except Exception as error:
            await self._fail(f"version {version} could not be put into service: {_describe(error)}")
            raise
        self._takeover = None
        self.versions_applied += 1
        self.versions_verified += 1  # the root digest was compared above
        self.state = "IDLE"
        await asyncio.to_thread(self._copy.settle)

    async def _exchange(self, served: Served, before: dict[str, str] | None) -> None:
        if before is None:
            await self._engine.load(served)
            return
        changed = {name for name, digest in served.digests.items() if before.get(name) != digest}
        started = time.monotonic()
        await self._engine.pause()
        await self._engine.swap(served, changed)
        await self._engine.resume()
        self.pause_seconds += time.monotonic() - started

    async def _engine_fails(self) -> bool:
        """Whether the engine is gone for good; the island then leaves the rotation."""
        trouble = self._engine.trouble()
        if trouble is None or not trouble.terminal:
            return False
        self._gate.close(trouble.message)
        await self._fail(trouble.message)
        return True

    async def _fail(self, why: str) -> None:
        self.state = "ERROR"
        self.terminal_error = self.last_error = why
        log.error("%s; this island leaves the rotation", why)
        await self._engine.close()  # requests frozen in the middle end now, and are retried elsewhere


def _same(served: Served) -> Served:
    return served


def _check(served: Served, manifest: Manifest) -> None:
    if served.version != manifest.version or served.root != manifest.root_digest:
        raise IntegrityError(f"version {manifest.version}: the rebuilt state is not the published one")


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, SprawlError) else f"{type(error).__name__}: {error}"
