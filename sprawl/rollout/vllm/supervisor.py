"""Keeps one vLLM server up on a checkpoint directory: starts it, checks it with a canary, kills it when it dies or
hangs, starts another, gives up in the end."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from sprawl.board.local_copy import MARK, Mark
from sprawl.errors import SprawlError
from sprawl.rollout.engine import EngineError, Trouble
from sprawl.rollout.vllm.api import Wanted
from sprawl.rollout.vllm.server import Server, ServerOptions

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 60.0
CANARY_TIMEOUT_S = 120.0
CANARY_DRIFT = 0.25  # nats between two canaries: other requests in the batch change the rounding, not more


@dataclass(frozen=True)
class WatchdogOptions:
    """When a server counts as dead, and how often it is started anew before that is given up."""

    every_s: float = 2.0
    answer_within_s: float = 5.0
    misses: int = 3  # unanswered health checks in a row
    stall_s: float = 300.0  # requests in flight and none finished: ask for two tokens
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    attempts: int = 5  # servers in a row that did not last `lasts_s`
    lasts_s: float = 600.0


class Supervisor:
    """`version` is what the server says it serves; `paused` is what a new one has to be; `running` requests are in
    flight. Whoever takes a server down, brings one up or changes its weights holds `control`."""

    def __init__(
        self, checkpoint: Path, vocab_size: int, options: ServerOptions, watchdog: WatchdogOptions, log_file: Path
    ) -> None:
        self.control = asyncio.Lock()
        self.version: int | None = None
        self.paused = False
        self.closed = False
        self.restarts = 0
        self.running = 0
        self.server: Server | None = None
        self._checkpoint = checkpoint
        self._vocab_size = vocab_size
        self._options = options
        self._watchdog = watchdog
        self._log_file = log_file
        self._why_down = "it has no weights yet"
        self._terminal: str | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[Server] | None = None
        self._moved_at = time.monotonic()
        self._short_lives = 0

    def serving(self) -> Server:
        """The server. Raises EngineError that says why there is none."""
        if self.closed:
            raise EngineError("the engine is closed")
        if self.server is None:
            raise EngineError(self._terminal or f"vLLM is down: {self._why_down}")
        return self.server

    def trouble(self) -> Trouble | None:
        """See the port."""
        if self._terminal is not None:
            return Trouble(self._terminal, terminal=True)
        if self.server is None and self.version is not None:
            return Trouble(f"vLLM is down: {self._why_down}")
        return None

    def mark(self) -> Mark:
        """Which version is on disk."""
        return Mark.model_validate_json((self._checkpoint / MARK).read_bytes())

    def moved(self) -> None:
        """The server was seen to generate."""
        self._moved_at = time.monotonic()

    async def take_down(self, why: str) -> None:
        """Kill the server. None comes up by itself after it."""
        server, self.server, self._why_down = self.server, None, why
        if server is not None:
            await server.kill()

    async def bring_up(self) -> None:
        """Start a server on what is on disk. Raises EngineError or SprawlError."""
        if self.closed:
            raise EngineError("the engine is closed")
        self._starting = asyncio.ensure_future(self._start())
        try:
            self.server = await self._starting
        except asyncio.CancelledError:
            if self.closed:
                raise EngineError("the engine is closed") from None
            raise
        except (EngineError, SprawlError) as error:
            self._why_down = str(error)
            raise
        finally:
            self._starting = None
        self._terminal = None
        self.moved()
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch())

    async def replace(self, why: str) -> None:
        """`take_down` and `bring_up`, for a server that can no longer be trusted."""
        log.warning("vLLM is killed and started anew: %s", why)
        self.restarts += 1
        await self.take_down(why)
        await self.bring_up()

    async def pause(self, server: Server) -> None:
        """`keep` freezes what is in flight; clearing the cache makes it recompute its KV from the weights to come."""
        await server.api.command("/pause", CONTROL_TIMEOUT_S, mode="keep", clear_cache="true")

    async def canary(self, server: Server) -> None:
        """Two greedy tokens, twice: their log-probs are numbers, the same both times, and of the version in service.
        Raises EngineError."""
        wanted = Wanted([token % self._vocab_size for token in range(1, 8)], 2, 0.0, 0, (), f"canary-{self.version}")
        try:
            async with asyncio.timeout(CANARY_TIMEOUT_S):
                once, again = await server.api.generate(wanted), await server.api.generate(wanted)
        except TimeoutError:
            raise EngineError(f"no token within {CANARY_TIMEOUT_S:.0f} s") from None
        if [span.version for span in once.spans + again.spans] != [self.version] * 2:
            raise EngineError(f"it says that its tokens are of version {once.spans[0].version}")
        if abs(once.logprobs[0] - again.logprobs[0]) > CANARY_DRIFT:
            raise EngineError(f"the same prompt gave log-prob {once.logprobs[0]}, then {again.logprobs[0]}")

    async def close(self) -> None:
        """Idempotent; ends a start that is under way."""
        self.closed = True
        for task in (self._watcher, self._starting):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        async with self.control:
            await self.take_down("the engine is closed")

    async def _start(self) -> Server:
        # Read before the start: should the directory move on meanwhile, a swap follows, which names all that moved.
        version = self.mark().version
        server = await Server.start(self._checkpoint, self._options, self._log_file)
        try:
            await server.api.command("/init_weight_transfer_engine", CONTROL_TIMEOUT_S, {"init_info": {}})
            await server.api.command("/update_weight_version", CONTROL_TIMEOUT_S, {"new_version": str(version)})
            self.version = version
            await self.canary(server)
            if self.paused:
                await self.pause(server)
        except BaseException:
            await server.kill()
            raise
        return server

    async def _watch(self) -> None:
        misses = 0
        while self._terminal is None:
            await asyncio.sleep(self._watchdog.every_s)
            server = self.server
            if server is None:
                misses = 0
                continue
            status = await server.api.health(self._watchdog.answer_within_s)
            misses = misses + 1 if status is None else 0
            reason = None
            if server.exit_code is not None:
                reason = f"it ended with {server.exit_code}: {server.last_words()}"
            elif status == 503:
                reason = f"its engine is dead: {server.last_words()}"
            elif misses >= self._watchdog.misses:
                reason = f"it left {misses} health checks unanswered"
            elif await self._stalls(server):
                reason = "it generates nothing any more"
            if reason is not None:
                misses = 0
                await self._revive(server, reason)
        self._watcher = None

    async def _stalls(self, server: Server) -> bool:
        """Whether requests are in flight, none has ended for long, and a new one gets no token either."""
        if not self.running or self.paused or time.monotonic() < self._moved_at + self._watchdog.stall_s:
            return False
        try:
            await self.canary(server)
        except EngineError:
            return not self.paused and self.server is server
        self.moved()
        return False

    async def _revive(self, server: Server, reason: str) -> None:
        """Start another, again and again with growing pauses; give up after too many short lives."""
        async with self.control:
            if self.server is not server:
                return
            lasted = time.monotonic() - server.started_at >= self._watchdog.lasts_s
            self._short_lives = 1 if lasted else self._short_lives + 1
            await self.take_down(reason)
            while self._short_lives <= self._watchdog.attempts:
                exponent = min(self._short_lives - 1, 16)
                await asyncio.sleep(min(self._watchdog.max_backoff_s, self._watchdog.backoff_s * 2**exponent))
                try:
                    await self.replace(self._why_down)
                except (EngineError, SprawlError):
                    self._short_lives += 1
                else:
                    return
            self._terminal = f"vLLM was started anew {self._watchdog.attempts} times and died again: {self._why_down}"
            log.error("%s", self._terminal)
