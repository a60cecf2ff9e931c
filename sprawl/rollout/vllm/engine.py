"""vLLM as an engine: a server process of ours on the checkpoint on local disk, whose weights are exchanged.

The checkpoint directory (`sprawl.board.local_copy`) is where weights come from, at the start and at every swap: the
host copy is patched there first, then the server is told which tensors to read again. A server that dies or hangs is
replaced by one from the same directory (`supervisor`). When an update fails half-way nothing of the server can be
trusted, so it is replaced too; the new one is at the new version, because the directory is.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sprawl.policy import Architecture
from sprawl.rollout.engine import EngineError, EngineLimits, Trouble, Watch
from sprawl.rollout.together import together
from sprawl.rollout.vllm.api import Wanted
from sprawl.rollout.vllm.server import Server, ServerOptions
from sprawl.rollout.vllm.supervisor import Supervisor, WatchdogOptions
from sprawl.rollout.wire import Sample, SamplingParams

if TYPE_CHECKING:
    from sprawl.board.reader import Served

log = logging.getLogger(__name__)

MAX_BATCH_TOKENS = 1 << 20


@dataclass(frozen=True)
class CommitTimes:
    """One swap, in seconds. `stage_s`: it was made ready for while tokens were generated; `pause_s`: no token was
    generated; `load_s`: the part of it that exchanged weights. `in_place`: changed elements were written where they
    are, instead of loading their layers again. `restarted`: the update failed and the server was replaced."""

    version: int
    tensors: int
    in_place: bool
    stage_s: float
    pause_s: float
    load_s: float
    canary_s: float
    restarted: bool


@dataclass
class _Commit:
    """A swap that is under way, from `pause` to `resume`."""

    paused_at: float
    tensors: int | None = None  # None: paused, not swapped
    load_s: float = 0.0
    in_place: bool = False
    stage_s: float = 0.0
    restarted: bool = False


@dataclass(frozen=True)
class _Staged:
    """What `server` has been made ready for."""

    server: Server
    target: str
    seconds: float


class VllmEngine:
    """See `sprawl.rollout.engine.Engine`. `load` and `swap` take a state that is on disk in `checkpoint`. `commits`
    holds the times of the last swaps."""

    kind: ClassVar[str] = "vllm"
    supervisor: ClassVar[type[Supervisor]] = Supervisor

    def __init__(
        self,
        checkpoint: Path,
        limits: EngineLimits,
        *,
        eos_ids: Sequence[int] = (),
        options: ServerOptions | None = None,
        watchdog: WatchdogOptions | None = None,
        log_file: Path,
    ) -> None:
        self.limits = limits
        self.commits: deque[CommitTimes] = deque(maxlen=256)
        self._checkpoint = checkpoint
        self._eos = frozenset(eos_ids)
        self._options = options or ServerOptions()
        self._supervisor = self.supervisor(
            checkpoint, limits.vocab_size, self._options, watchdog or WatchdogOptions(), log_file
        )
        self._commit: _Commit | None = None
        self._staged: _Staged | None = None
        self._why_whole = ""
        self._tokens = 0
        self._swaps = 0

    @classmethod
    def from_files(
        cls,
        files: Mapping[str, bytes],
        checkpoint: Path,
        *,
        eos_ids: Sequence[int],
        options: ServerOptions,
        log_file: Path,
    ) -> Self:
        """An engine for the model whose `config.json` is among `files`. Raises ConfigError for an unknown family."""
        arch = Architecture.from_hf(json.loads(files["config.json"]))
        limits = EngineLimits(arch.vocab, arch.max_positions, MAX_BATCH_TOKENS)
        return cls(checkpoint, limits, eos_ids=eos_ids, options=options, log_file=log_file)

    async def load(self, served: Served) -> None:
        host = self._supervisor
        async with host.control:
            mark = host.mark()
            if mark.root_digest != served.root:
                raise EngineError(f"{self._checkpoint} is at version {mark.version}, not at version {served.version}")
            await host.take_down("it is starting")
            self._commit, host.paused = None, False
            await host.bring_up()
            longest = await host.serving().api.context_length()
            self.limits = replace(self.limits, max_length=min(self.limits.max_length, longest))

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, watch: Watch | None = None
    ) -> list[Sample]:
        host = self._supervisor
        server = host.serving()
        seeds = params.seeds if params.seeds is not None else [secrets.randbits(63) for _ in range(params.n)]
        stops = sorted(self._eos | frozenset(params.stop_token_ids))
        wanted = [
            Wanted(input_ids, params.max_new_tokens, params.temperature, seed, stops, str(host.version))
            for seed in seeds
        ]
        if not host.running:
            host.moved()
        host.running += 1
        try:
            samples = await together(
                [
                    server.api.generate(one, partial(watch, row) if watch is not None else None)
                    for row, one in enumerate(wanted)
                ]
            )
        finally:
            host.running -= 1
        host.moved()
        self._tokens += sum(len(sample.token_ids) for sample in samples)
        return samples

    async def stage(self, target: str) -> None:
        host, self._staged = self._supervisor, None
        async with host.control:
            started = time.monotonic()
            try:
                server = host.serving()
                why = await host.stage(server, target)
            except EngineError as error:
                why = str(error)
            if not why:
                self._staged = _Staged(server, target, time.monotonic() - started)
            elif why != self._why_whole:
                log.info("%s loads whole layers: %s", host.product, why)
            self._why_whole = why

    async def pause(self) -> None:
        host = self._supervisor
        async with host.control:
            started = time.monotonic()
            try:
                await host.pause(host.serving())
            except EngineError as error:
                await host.replace(str(error))
                started = time.monotonic()
                await host.pause(host.serving())
            host.paused, self._commit = True, _Commit(started)

    async def swap(self, served: Served, changed: AbstractSet[str]) -> None:
        host, commit, staged = self._supervisor, self._commit, self._staged
        self._staged = None
        if commit is None:
            raise RuntimeError("swap without pause: a forward pass could see half of the new weights")
        async with host.control:
            started = time.monotonic()
            try:
                server = host.serving()
                if staged is not None and (staged.server, staged.target) == (server, served.root):
                    commit.in_place, commit.stage_s = await host.write(server, served), staged.seconds
                if not commit.in_place:
                    await host.update(server, served, changed)
                host.version = served.version
            except EngineError as error:
                await host.replace(f"version {served.version} could not be loaded: {error}")
                commit.restarted = True
            self._swaps += 1
            commit.tensors, commit.load_s = len(changed), time.monotonic() - started

    async def resume(self) -> None:
        host = self._supervisor
        async with host.control:
            commit, self._commit, host.paused = self._commit, None, False
            try:
                await host.resume(host.serving())
            except EngineError as error:
                await host.replace(str(error))
            resumed = time.monotonic()
            host.moved()
            if commit is None or commit.tensors is None:
                return
            try:
                await host.canary(host.serving())
            except EngineError as error:
                commit.restarted = True
                await self._judge(host, error)
            assert host.version is not None
            self.commits.append(
                CommitTimes(
                    version=host.version,
                    tensors=commit.tensors,
                    in_place=commit.in_place,
                    stage_s=commit.stage_s,
                    pause_s=resumed - commit.paused_at,
                    load_s=commit.load_s,
                    canary_s=time.monotonic() - resumed,
                    restarted=commit.restarted,
                )
            )

    async def _judge(self, host: Supervisor, error: EngineError) -> None:
        """The canary failed: is it the server or are it the weights? A new server on the same weights tells."""
        try:
            await host.replace(f"version {host.version} failed its canary: {error}")
        except EngineError as again:
            reason = f"version {host.version} failed its canary, in a new server too: {again}"
            await host.take_down(reason)
            raise EngineError(reason) from error

    def trouble(self) -> Trouble | None:
        return self._supervisor.trouble()

    def info(self) -> dict[str, Any]:
        host = self._supervisor
        return {
            "kind": self.kind,
            "compute_dtype": self._options.dtype,
            "pid": host.server.pid if host.server else None,
            "up_s": round(time.monotonic() - host.server.ready_at, 1) if host.server else 0.0,
            "restarts": host.restarts,
            "running_groups": host.running,
            "generated_tokens": self._tokens,
            "weight_changes": self._swaps,
            "last_commit": asdict(self.commits[-1]) if self.commits else None,
            "max_length": self.limits.max_length,
            "vocab_size": self.limits.vocab_size,
        }

    async def close(self) -> None:
        await self._supervisor.close()
