"""A published run in memory, a character tokenizer, and one island around the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from sprawl.board.commit import CommitOptions
from sprawl.board.publisher import Publisher
from sprawl.board.reader import Prepared, Served, VersionReader
from sprawl.board.store import MemoryStore
from sprawl.policy.tokenizer import Tokenizer
from sprawl.rollout.engine import Engine
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.gate import Gate
from sprawl.rollout.host_copy import HostCopy
from sprawl.rollout.reconciler import Reconciler
from sprawl.rollout.service import Service

T = TypeVar("T")
RUN = "run-1"
EOS = 1
CHARACTERS = "<pad>", "<eos>", *"0123456789+=abcdefghijklmnopqrstuvwxyz \n"


def go(work: Coroutine[Any, Any, T], limit_s: float = 30.0) -> T:
    return asyncio.run(asyncio.wait_for(work, limit_s))


async def until(condition: Any, limit_s: float = 10.0) -> None:
    """Wait for a condition that some task will make true."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


def character_tokenizer(chat_template: str | None = None) -> Tokenizer:
    fast = FastTokenizer(models.WordLevel({token: i for i, token in enumerate(CHARACTERS)}, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens(["<pad>", "<eos>"])
    return Tokenizer(fast, (EOS,), chat_template)


class TinyRun:
    """Versions of a two-tensor model on a MemoryStore; `publish` adds the next one."""

    def __init__(self, keyframe_every: int = 4) -> None:
        self.store = MemoryStore()
        self.states: list[dict[str, torch.Tensor]] = []
        self._publisher = Publisher(self.store, RUN, CommitOptions(keyframe_every=keyframe_every, dtype="bfloat16"))

    def publish(self, count: int = 1) -> TinyRun:
        for _ in range(count):
            version = len(self.states)
            state = {
                "a": torch.arange(64, dtype=torch.bfloat16).reshape(8, 8),
                "b": torch.full((16,), float(version), dtype=torch.bfloat16),
            }
            self._publisher.publish(version, version, state)
            self.states.append(state)
        return self

    def reader(self) -> VersionReader:
        return VersionReader(self.store, RUN)


@dataclass
class Stack:
    """One island without HTTP. `async with` runs the reconciler."""

    run: TinyRun
    engine: Engine = field(default_factory=FakeEngine)
    follow: Any = "demand"
    mode: Any = "in_place"
    max_wait_s: float = 5.0
    patience_s: float = 5.0
    reader: Any = None
    chat_template: str | None = None
    copy: Any = None

    def __post_init__(self) -> None:
        wake = asyncio.Event()
        self.gate = Gate(self.mode, wake, patience_s=self.patience_s)
        reader = self.reader or self.run.reader()
        self.reconciler = Reconciler(
            reader, self.engine, self.gate, follow=self.follow, wake=wake, poll_s=0.01, copy=self.copy
        )
        self.service = Service(
            island_id="island-0",
            run_id=RUN,
            engine=self.engine,
            gate=self.gate,
            reconciler=self.reconciler,
            tokenizer=character_tokenizer(self.chat_template),
            max_wait_s=self.max_wait_s,
        )

    async def __aenter__(self) -> Stack:
        self.task = asyncio.ensure_future(self.reconciler.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.engine.close()


def hold(copy: HostCopy, reader: VersionReader, version: int) -> Served:
    """Let a host copy hold a version, whatever it held before."""
    copy.stage_whole(reader.materialise(version))
    return _committed(copy, reader)


def step(copy: HostCopy, reader: VersionReader, prepared: Prepared) -> Served:
    copy.stage(reader, prepared)
    return _committed(copy, reader)


def _committed(copy: HostCopy, reader: VersionReader) -> Served:
    served = copy.commit(reader)
    copy.settle()
    return served
