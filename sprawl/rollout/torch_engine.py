"""The embedded engine: torch on the CPU, continuous batching on one worker thread.

Requests join and leave the running batch between two tokens (`sprawl.rollout.batching`), and every row of a batch is
computed as if it were alone: the same request with the same weights and seeds gives the same tokens and log-probs, bit
for bit, whatever else the engine is doing, however its prompt was cut into blocks, and also when the sample is computed
again from its tokens after a swap. Keys and values live in a pool of pages that is sized at the start; requests wait
while it is full.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch

from sprawl.delta.state import State
from sprawl.delta.views import dense_view
from sprawl.errors import SprawlError
from sprawl.policy import Architecture, Decoder, Tokenizer
from sprawl.rollout.batching.batch import Batch
from sprawl.rollout.batching.blocks import Blocks
from sprawl.rollout.batching.groups import Group
from sprawl.rollout.batching.pages import PAGE, PagePool, page_bytes
from sprawl.rollout.engine import EngineError, EngineLimits, Trouble, Watch
from sprawl.rollout.rows import Row
from sprawl.rollout.wire import Sample, SamplingParams

if TYPE_CHECKING:
    from sprawl.board.reader import Served

MAX_BATCH_TOKENS = 1 << 18
CACHE_BYTES = 1 << 29  # keys and values, at most; taken from the system as they are needed
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchEngine:
    """See `sprawl.rollout.engine.Engine`. Tokens in, tokens out; `eos_ids` end a sample besides the request's own."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        eos_ids: Sequence[int] = (),
        compute_dtype: str = "float32",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        arch = decoder.arch
        self.decoder = decoder.eval()
        pages = cache_bytes // page_bytes(arch)
        # A prompt and one sample share whole pages only: two pages more than the sequence has.
        longest = min(arch.max_positions, (pages - 2) * PAGE)
        if longest < 1:
            least = 3 * page_bytes(arch)
            raise SprawlError(f"a cache of {cache_bytes} bytes holds no sequence", f"give it {least} bytes or more")
        self.limits = EngineLimits(arch.vocab, longest, MAX_BATCH_TOKENS, resumes=True)
        self._eos = frozenset(eos_ids)
        self._dtype = compute_dtype
        self._pool = PagePool(arch, pages)
        self._blocks = Blocks(self.decoder, self._pool, DTYPES[compute_dtype], longest)
        self._batch = Batch(self._blocks, self._pool)
        self._version: int | None = None
        self._swaps = 0
        self._turn = threading.Condition()  # guards what follows
        self._inbox: list[Group] = []
        self._paused = False
        self._busy = False
        self._closed = False
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
        if not 0 < len(input_ids) <= self.limits.max_length - params.max_new_tokens:
            lengths = f"{len(input_ids)} prompt + {params.max_new_tokens} new tokens"
            raise EngineError(f"{lengths} do not fit in {self.limits.max_length} positions")
        stops = self._eos | frozenset(params.stop_token_ids)
        taken = params.resume or [[] for _ in range(params.n)]
        group = Group(
            prompt=list(input_ids),
            params=params,
            seeds=params.seeds if params.seeds is not None else [secrets.randbits(63) for _ in range(params.n)],
            stops=stops,
            watch=watch,
            rows=[Row.after(tokens, stops, params.max_new_tokens) for tokens in taken],
            taken=taken,
        )
        if group.complete:  # nothing is left of what is resumed
            return [row.sample() for row in group.rows]
        group.future.set_running_or_notify_cancel()  # from here on the worker alone ends it
        with self._turn:
            self._inbox.append(group)
            self._turn.notify_all()
        try:
            return await asyncio.wrap_future(group.future)
        finally:
            group.cancelled.set()

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
        self._swaps += 1
        self._batch.forget()

    async def resume(self) -> None:
        with self._turn:
            self._paused = False
            self._turn.notify_all()

    def trouble(self) -> Trouble | None:
        return None

    def info(self) -> dict[str, Any]:
        return {
            "kind": "torch",
            "compute_dtype": self._dtype,
            "threads": torch.get_num_threads(),
            "queued_groups": self._batch.queued + len(self._inbox),
            "running_samples": self._batch.running,
            "groups": self._batch.completed,
            "generated_tokens": self._batch.tokens,
            "weight_changes": self._swaps,
            "recomputed_caches": self._batch.recomputed,
            "cache_pages": self._pool.pages,
            "cache_pages_free": self._pool.free,
            "cache_bytes": self._pool.pages * page_bytes(self.decoder.arch),
            "row_sizes": list(self._blocks.sizes),
            "max_length": self.limits.max_length,
            "vocab_size": self.limits.vocab_size,
        }

    async def close(self) -> None:
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        await asyncio.to_thread(self._worker.join)

    # --- the worker thread ---

    def _load(self, state: State) -> None:
        """Take the weights. A quantised view is computed with at the values that it stands for."""
        dtype = DTYPES[self._dtype]
        self.decoder.load_served(dense_view(state, dtype), dtype)

    def _wait_idle(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: not self._busy)

    @torch.inference_mode()
    def _work(self) -> None:
        while self._next_turn():
            assert self._version is not None
            try:
                self._batch.step(self._version)
            except Exception as error:  # out of memory, ...: nobody may wait forever
                self._batch.fail(EngineError(f"{type(error).__name__}: {error}"))
            finally:
                with self._turn:
                    self._busy = False
                    self._turn.notify_all()
        for group in self._inbox:
            self._batch.add(group)
        self._batch.fail(EngineError("the engine was closed"))

    def _next_turn(self) -> bool:
        """Wait for something to do, and not while paused. False when closed."""
        with self._turn:
            self._turn.wait_for(
                lambda: self._closed or (not self._paused and (bool(self._inbox) or not self._batch.idle))
            )
            if self._closed:
                return False
            self._busy = True
            for group in self._inbox:
                self._batch.add(group)
            self._inbox.clear()
            return True
