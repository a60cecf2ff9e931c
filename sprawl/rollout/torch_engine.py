"""The embedded engine: torch on the CPU, one worker thread, one group at a time.

A request is decoded as its own batch: the prompt is read once, then copied to n rows that advance in lockstep. Rows
that finished stay in the batch, so a row's arithmetic never depends on when its neighbours stop. The same request with
the same weights and seeds therefore gives the same tokens bit for bit, whatever else the engine is doing. The price is
that requests queue (first in, first out) instead of sharing a batch.
"""

from __future__ import annotations

import asyncio
import json
import queue
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sprawl.delta.state import State
from sprawl.delta.views import dense_view
from sprawl.policy import Architecture, Decoder, KvCache, Tokenizer
from sprawl.rollout.engine import EngineError, EngineLimits, Watch
from sprawl.rollout.rows import Row
from sprawl.rollout.sampling import NonFiniteLogits, sample, uniforms
from sprawl.rollout.wire import Sample, SamplingParams

if TYPE_CHECKING:
    from sprawl.board.reader import Served

MAX_BATCH_TOKENS = 1 << 18
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Job:
    """One group in the worker. `history[k]` holds token k of every row, of finished rows too: they stay in the batch.
    `epoch` is the weight epoch the cache was computed with. `taken` are tokens that rows begin with: decoded one by one
    as if they had been sampled, because only the same arithmetic gives the same bits afterwards."""

    prompt: list[int]
    params: SamplingParams
    seeds: list[int]
    stops: frozenset[int]
    watch: Watch | None
    future: Future[list[Sample]]
    rows: list[Row]
    taken: list[list[int]]
    cancelled: threading.Event = field(default_factory=threading.Event)
    cache: KvCache | None = None
    epoch: int = -1
    history: list[list[int]] = field(default_factory=list)


class TorchEngine:
    """See `sprawl.rollout.engine.Engine`. Tokens in, tokens out; `eos_ids` end a sample besides the request's own."""

    def __init__(self, decoder: Decoder, *, eos_ids: Sequence[int] = (), compute_dtype: str = "float32") -> None:
        self.decoder = decoder.eval()
        self.limits = EngineLimits(decoder.arch.vocab, decoder.arch.max_positions, MAX_BATCH_TOKENS, resumes=True)
        self._eos = frozenset(eos_ids)
        self._dtype = compute_dtype
        self._version: int | None = None
        self._epoch = 0  # counts weight changes; a job whose cache is older recomputes it
        self._turn = threading.Condition()  # guards the three flags below
        self._paused = False
        self._busy = False
        self._closed = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._tokens = 0
        self._groups = 0
        self._recomputed = 0
        self._worker = threading.Thread(target=self._work, name="torch-engine", daemon=True)
        self._worker.start()

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], tokenizer: Tokenizer, *, compute_dtype: str) -> TorchEngine:
        """An engine for the model whose `config.json` is among `files`. Raises ConfigError for an unknown family."""
        arch = Architecture.from_hf(json.loads(files["config.json"]))
        return cls(Decoder(arch), eos_ids=tokenizer.eos_ids, compute_dtype=compute_dtype)

    # --- the port ---

    async def load(self, served: Served) -> None:
        await self.pause()
        await self.swap(served, frozenset(served.state))
        await self.resume()

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, watch: Watch | None = None
    ) -> list[Sample]:
        if self._closed or self._version is None:
            raise EngineError("the engine is closed" if self._closed else "the engine has no weights yet")
        stops = self._eos | frozenset(params.stop_token_ids)
        taken = params.resume or [[] for _ in range(params.n)]
        job = Job(
            prompt=list(input_ids),
            params=params,
            seeds=params.seeds if params.seeds is not None else [secrets.randbits(63) for _ in range(params.n)],
            stops=stops,
            watch=watch,
            future=Future(),
            taken=taken,
            rows=[Row.after(tokens, stops, params.max_new_tokens) for tokens in taken],
        )
        self._jobs.put(job)
        try:
            return await asyncio.wrap_future(job.future)
        finally:
            job.cancelled.set()
            with self._turn:
                self._turn.notify_all()  # a cancelled job may be frozen by a pause

    @property
    def watched_version(self) -> int | None:
        return self._version

    async def pause(self) -> None:
        with self._turn:
            self._paused = True
        await asyncio.to_thread(self._wait_idle)

    async def swap(self, served: Served, changed: AbstractSet[str]) -> None:
        if not self._paused or self._busy:
            raise RuntimeError("swap without pause: a forward pass could see half of the new weights")
        if changed or self._version is None:
            await asyncio.to_thread(self._load, served.state)
        self._version = served.version
        self._epoch += 1

    async def resume(self) -> None:
        with self._turn:
            self._paused = False
            self._turn.notify_all()

    def info(self) -> dict[str, Any]:
        return {
            "kind": "torch",
            "compute_dtype": self._dtype,
            "threads": torch.get_num_threads(),
            "queued_groups": self._jobs.qsize(),
            "groups": self._groups,
            "generated_tokens": self._tokens,
            "weight_changes": self._epoch,
            "recomputed_caches": self._recomputed,
            "max_length": self.limits.max_length,
            "vocab_size": self.limits.vocab_size,
        }

    async def close(self) -> None:
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self._jobs.put(None)
        await asyncio.to_thread(self._worker.join)

    # --- the worker thread ---

    def _load(self, state: State) -> None:
        """Take the weights. A quantised view is computed with at the values that it stands for."""
        dtype = DTYPES[self._dtype]
        self.decoder.load_served(dense_view(state, dtype), dtype)

    def _wait_idle(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: not self._busy)

    @contextmanager
    def _forward(self, job: Job) -> Iterator[bool]:
        """The right to run one forward pass: waits while paused. Yields False when the job must not go on."""
        with self._turn:
            self._turn.wait_for(lambda: not self._paused or self._closed or job.cancelled.is_set())
            go_on = not (self._closed or job.cancelled.is_set())
            self._busy = go_on
        try:
            yield go_on
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    @torch.inference_mode()
    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                self._fail_queued()
                return
            if not job.cancelled.is_set() and job.future.set_running_or_notify_cancel():
                self._run(job)

    def _fail_queued(self) -> None:
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job.future.set_exception(EngineError("the engine was closed"))

    def _run(self, job: Job) -> None:
        try:
            while any(row.finished is None for row in job.rows):
                with self._forward(job) as go_on:
                    if not go_on:
                        raise EngineError("the engine was closed" if self._closed else "the request was cancelled")
                    self._step(job)
        except NonFiniteLogits:
            job.future.set_exception(EngineError(f"version {self._version} produced non-finite logits"))
        except Exception as error:
            wrapped = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
            job.future.set_exception(wrapped)
        else:
            self._groups += 1
            job.future.set_result([row.sample() for row in job.rows])
        finally:
            job.cache = None

    def _step(self, job: Job) -> None:
        """One token for every row: forward, sample, record, all under the same weights."""
        assert self._version is not None
        logits = self._logits(job)
        position = len(job.history)
        tokens, logprobs = sample(logits, job.params.temperature, uniforms(job.seeds, position))
        given = [position < len(taken) for taken in job.taken]
        tokens = [job.taken[i][position] if given[i] else token for i, token in enumerate(tokens)]
        job.history.append(tokens)
        for index, (row, token, logprob) in enumerate(zip(job.rows, tokens, logprobs, strict=True)):
            if row.finished is not None or given[index]:
                continue
            row.push(token, logprob, self._version, job.stops, job.params.max_new_tokens)
            self._tokens += 1
            if job.watch is not None and job.watch(index, token, logprob):
                row.finished = "stop"

    def _logits(self, job: Job) -> Tensor:
        """fp32 [n, vocab] of the next position, from the cache where it was computed with today's weights."""
        if job.cache is not None and job.epoch == self._epoch:
            return self.decoder(torch.tensor(job.history[-1]).unsqueeze(-1), job.cache, last_only=True)
        self._recomputed += job.cache is not None
        job.cache, job.epoch = None, self._epoch
        cache = self.decoder.new_cache(1, len(job.prompt) + job.params.max_new_tokens)
        logits = self.decoder(torch.tensor([job.prompt]), cache, last_only=True).expand(job.params.n, -1)
        cache.expand(job.params.n)
        if job.history:
            logits = self.decoder(torch.tensor(job.history).T.contiguous(), cache, last_only=True)
        job.cache = cache
        return logits
