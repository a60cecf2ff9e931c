"""The board of benchmarks.sync: a trainer's publisher whose commits are timed, and the board over HTTP on one link.

Versions are those of a real model whose masters take steps of one size, as Adam's are; how large, is chosen so that a
given share of the bf16 weights changes. Every version can be published as a delta or as a whole checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import torch
from aiohttp import web

from sprawl.board.commit import CommitOptions, Committer, Draft, put_blob
from sprawl.board.ledger import Ledger
from sprawl.board.local import LocalStore
from sprawl.board.manifest import DELTA, KEYFRAME, TensorEntry
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.records import RunRecord
from sprawl.delta.codec import encode_whole
from sprawl.delta.state import State, dtype_name, root_digest, served_view, state_bytes, tensor_digests
from sprawl.policy.checkpoint import load_auxiliary, load_weights

RUN = "sync"
CHUNK = 1 << 16
SAMPLE = 1 << 20


@dataclass(frozen=True)
class Published:
    """`began`: Unix seconds at which the manifest's creation was asked for; `done`: when it was durable. `encode_s`:
    from the weights to then, blobs written. `bytes`: what an island has to fetch besides the manifest."""

    version: int
    whole: bool
    encode_s: float
    began: float
    done: float
    bytes: int
    changed_share: float


class CommitClock(LocalStore):
    """A board directory that remembers when its last manifest was created."""

    began = done = 0.0

    def create(self, key: str, data: bytes) -> bool:
        began = time.time()
        made = super().create(key, data)
        if "/manifests/" in key:
            self.began, self.done = began, time.time()
        return made


class Writer:
    """Publishes versions of the model in `base` to a new board in `directory`; version 0 is there at once."""

    def __init__(self, directory: Path, base: Path, share: float, compute_dtype: str) -> None:
        self.store = CommitClock(directory)
        files = load_auxiliary(base)
        rollout = {"follow": "eager", "compute_dtype": compute_dtype}
        record = RunRecord(
            run_id=RUN,
            created_at=time.time(),
            config={"rollout": rollout, "threads": {"island": 1}},
            base_digest="",
            parameters=0,
            sprawl_version="0",
        )
        Ledger(self.store, RUN).create_run(record)
        self._generator = torch.Generator().manual_seed(0)
        self._masters = masters(load_weights(base), self._generator)
        self._size = step_size(self._masters, share)
        options = CommitOptions(keyframe_every=1_000_000, dtype="bfloat16", files=files)
        self._publisher = Publisher(self.store, RUN, options)
        self._committer = Committer(self.store, RUN, options)
        self._reader = VersionReader(self.store, RUN)
        self.next = 0
        self.publish(whole=False)
        self.full_bytes = self._reader.require(0).full_bytes

    def step(self) -> None:
        """Move the masters."""
        for weight in self._masters.values():
            weight.add_(torch.randn(weight.shape, generator=self._generator).clamp_(-1, 1), alpha=self._size)

    def publish(self, *, whole: bool) -> Published:
        """Publish the masters as they are, as a delta or as a whole checkpoint."""
        version, started = self.next, time.time()
        state = served_view(self._masters, "bfloat16")
        if whole:
            self._publish_whole(version, state)
            self._publisher.resume(state, version)
        else:
            self._publisher.publish(version, version, state)
        manifest = self._reader.require(version)
        self.next += 1
        return Published(
            version=version,
            whole=whole,
            encode_s=self.store.began - started,
            began=self.store.began,
            done=self.store.done,
            bytes=manifest.bytes_of(KEYFRAME if whole else DELTA),
            changed_share=manifest.changed_share,
        )

    def _publish_whole(self, version: int, state: State) -> None:
        digests = tensor_digests(state)
        root = root_digest(digests)
        tensors = {
            name: TensorEntry(digest=digests[name], dtype=dtype_name(tensor.dtype), shape=list(tensor.shape))
            for name, tensor in state.items()
        }
        draft = Draft(
            version=version,
            step=version,
            root=root,
            base_version=None,
            base_root=None,
            tensors=tensors,
            blobs=[put_blob(self.store, RUN, version, encode_whole(state), KEYFRAME)],
            removed=[],
            changed_share=1.0,
            full_bytes=state_bytes(state),
            whole=True,
        )
        started = time.monotonic()
        manifest, committed_before = self._committer.commit(draft)
        self._committer.settle(manifest, root, started, committed_before)


def masters(weights: State, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """fp32 weights that round to (nearly) these bf16 ones, at random places between two of them: masters that stood
    exactly on them would not change for many steps and then all at once."""
    return {
        name: weight.float() + _spacing(weight) * (torch.rand(weight.shape, generator=generator) - 0.5)
        for name, weight in weights.items()
    }


def step_size(weights: dict[str, torch.Tensor], share: float) -> float:
    """The size of a step at which about `share` of the bf16 weights change. A weight at a random place between two
    bf16 values passes the middle with a chance of the step over their distance."""
    every = -(-sum(weight.numel() for weight in weights.values()) // SAMPLE)
    sample = torch.cat([weight.reshape(-1)[::every] for weight in weights.values()])
    direction = torch.randn(sample.shape, generator=torch.Generator().manual_seed(1)).clamp_(-1, 1).abs_()
    chances = direction / _spacing(sample)
    low, high = 1e-12, 1.0
    for _ in range(50):
        middle = (low * high) ** 0.5
        above = float((middle * chances).clamp_(max=1).mean()) > share
        low, high = (low, middle) if above else (middle, high)
    return low


def _spacing(weight: torch.Tensor) -> torch.Tensor:
    """Distance of neighbouring bf16 values around each weight."""
    _, exponent = torch.frexp(weight.float())
    return torch.exp2((exponent - 8).clamp(min=-126).float())


class Link:
    """A board directory over HTTP, to read. All answers together get `rate` bytes a second (None: as it comes); `sent`
    counts their bytes."""

    def __init__(self, root: Path) -> None:
        self.rate: float | None = None
        self.sent = 0
        self._root = root.resolve()
        self._free_at = 0.0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Yields the board's URL."""
        app = web.Application()
        app.router.add_get("/{key:.*}", self._answer)  # HEAD too
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = (self._root / request.match_info["key"]).resolve()
        if not path.is_relative_to(self._root) or not path.is_file():
            raise web.HTTPNotFound
        with path.open("rb") as file:  # in memory already: it was written a moment ago
            response = web.StreamResponse(headers={"Content-Length": str(os.fstat(file.fileno()).st_size)})
            await response.prepare(request)
            while request.method == "GET" and (part := file.read(CHUNK)):
                await self._turn(len(part))
                await response.write(part)
                self.sent += len(part)
        return response

    async def _turn(self, size: int) -> None:
        """Wait until the link is free for `size` bytes: readers take turns, chunk by chunk."""
        if self.rate is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + size / self.rate
        await asyncio.sleep(self._free_at - now)
