"""Brings an island's weights to the version it should serve: follows the board, one verified step at a time.

`next_target` decides, purely; `Reconciler` does. Downloading, decoding and a first digest check happen outside the gate
and touch nothing; patching, the check of what was patched and the engine's swap happen inside. A failure before
anything was touched is retried while the old version is served on. When the engine refuses a version, the patch is
undone, the engine begins anew with the old version, and the refused one is stepped over. Any other failure is terminal,
because nobody can vouch for the state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

from sprawl.errors import BoardError, IntegrityError, SprawlError
from sprawl.rollout.engine import Engine, EngineError
from sprawl.rollout.gate import CommitUndone, Gate, GateClosed
from sprawl.rollout.host_copy import HostCopy, MemoryCopy
from sprawl.rollout.wire import ServerState, VersionPolicy

if TYPE_CHECKING:
    from sprawl.board.manifest import Manifest
    from sprawl.board.reader import Served, VersionReader

Follow = Literal["demand", "eager"]

log = logging.getLogger(__name__)

IDLE_LOOK_S = 5.0  # how often the head is looked up when nobody asks
MAX_BACKOFF_S = 5.0
REBUILD_AFTER = 3  # failed preparations in a row before the whole state is rebuilt from a keyframe


def next_target(follow: Follow, applied: int | None, head: int | None, waiting: Sequence[VersionPolicy]) -> int | None:
    """The version to put into service next, None to stay.

    With nothing applied: exactly the lowest version the waiting requests need (an open request needs the head, or its
    max_version). Later: one step, if a waiting request needs it or the island is eager.
    """
    if head is None:
        return None
    if applied is not None:
        needed = any(policy.lowest > applied for policy in waiting)
        return applied + 1 if head > applied and (needed or follow == "eager") else None
    if waiting:
        wanted = min(_first_version(policy, head) for policy in waiting)
        if wanted <= head:
            return wanted
    return head if follow == "eager" else None


def _first_version(policy: VersionPolicy, head: int) -> int:
    if policy.exact_version is not None or policy.min_version is not None:
        return policy.lowest
    return head if policy.highest is None else min(head, policy.highest)


class Reconciler:
    """Owns the island's host copy of the served view and is the only one who changes the engine's weights.

    `state`, `latest_seen`, `last_error`, `terminal_error` and the counters are read by /server_info, /metrics and
    the heartbeat. `run` is the only task; `wake` (shared with the gate and /wake) cuts its naps short.
    """

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
        self._served: Served | None = None
        self._manifest: Manifest | None = None  # of what is served
        self._refused: tuple[int, str] | None = None  # the version that the engine would not take, and why
        self._failures = 0  # in a row, of any kind
        self._broken = 0  # of those, bytes that were not what a digest promised
        self._looked_at = float("-inf")

    def wake(self) -> None:
        """Look at the board now instead of at the next poll."""
        self._looked_at = float("-inf")
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled or terminally failed."""
        while self.terminal_error is None:
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
        if self.follow == "demand" and not self._gate.waiting and time.monotonic() < self._looked_at + IDLE_LOOK_S:
            return False
        head = await self._head(applied)
        target = next_target(self.follow, applied, head, self._gate.waiting)
        if self._refused is not None and target == self._refused[0]:
            target = target + 1 if head is not None and head > target else None
        if target is None or self._engine.trouble() is not None:
            return False
        if self._served is None:
            await self._materialise(target)
        elif self._broken >= REBUILD_AFTER or not await self._has(target):
            assert head is not None
            jump = await self._jump_target(self._served.version, head)
            log.warning("the chain after version %s is gone or broken: rebuilding %s", applied, jump)
            await self._materialise(jump)
        else:
            await self._patch(self._served, target)
        return True

    async def _head(self, applied: int | None) -> int | None:
        """Newest version worth knowing of. Following the chain costs one small read, a version that a request waits
        for another (retention may have cut the chain below it); the full look-up is for cold starts and for now and
        then."""
        now = time.monotonic()
        if applied is not None and now < self._looked_at + IDLE_LOOK_S:
            known = max(applied, self.latest_seen or 0)
            needed = min((p.lowest for p in self._gate.waiting if p.lowest > known), default=known + 1)
            for version in {known + 1, needed}:
                if await self._has(version):
                    known = max(known, version)
            self.latest_seen = known
        else:
            self.latest_seen = await asyncio.to_thread(self._reader.head)
            if self.latest_seen is not None:
                self._looked_at = now
        return self.latest_seen

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
        left = await asyncio.to_thread(self._copy.open) if self._served is None else None
        build: Callable[[], Served]
        if left is not None and left.version == version and left.root == manifest.root_digest:
            build = partial(_same, left)
        elif left is not None and left.version < version:
            prepared = await asyncio.to_thread(self._reader.prepare, left, version)
            build = partial(self._copy.step, self._reader, prepared)
        else:
            served = await asyncio.to_thread(self._reader.materialise, version)
            build = partial(self._copy.replace, served)
        self.prepare_seconds += time.monotonic() - started
        await self._commit(manifest, build, None)

    async def _patch(self, served: Served, version: int) -> None:
        """One step of the chain: decode against the intact base, then patch the host copy inside the gate."""
        from sprawl.board.reader import Prepared  # heavy, and this module is imported to check settings too
        from sprawl.delta.compose import inverse

        started = time.monotonic()
        self.state = "FETCHING"
        prepared = await asyncio.to_thread(self._reader.prepare, served, version)
        # While the old version is still served: what does not give the published state is found before it is touched.
        await asyncio.to_thread(self._reader.check, served, prepared)
        assert self._manifest is not None
        back = Prepared(
            version=served.version,
            base_version=version,
            base_root=prepared.manifest.root_digest,
            manifest=self._manifest,
            overwrites=await asyncio.to_thread(inverse, served.state, prepared.overwrites),
            bytes=0,
        )
        self.prepare_seconds += time.monotonic() - started
        await self._commit(
            prepared.manifest,
            partial(self._copy.step, self._reader, prepared),
            partial(self._copy.step, self._reader, back),
        )

    async def _commit(self, manifest: Manifest, build: Callable[[], Served], undo: Callable[[], Served] | None) -> None:
        """Take a version through the gate. `build` makes its state out of the host copy, which must have the published
        root digest then; `undo` takes the host copy back."""
        self.state = "STAGING"
        version = manifest.version

        async def install() -> None:
            self.state = "COMMITTING"
            before = dict(self._served.digests) if self._served is not None else None
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
            await self._gate.commit(version, install)
        except GateClosed:
            raise
        except CommitUndone as error:
            self._refused = version, str(error)
            raise
        except Exception as error:
            await self._fail(f"version {version} could not be put into service: {_describe(error)}")
            raise
        self.versions_applied += 1
        self.versions_verified += 1  # the root digest was compared above
        self.state = "IDLE"

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
