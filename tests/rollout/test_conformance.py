"""The engines that run everywhere, held to what every engine must show."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import pytest
import torch

from sprawl.board.reader import Served
from sprawl.policy import Decoder
from sprawl.rollout.engine import Engine
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.torch_engine import TorchEngine
from tests.rollout.conformance import Bench, EngineConformance
from tests.rollout.test_torch_engine import ARCH, served


class LocalBench(ABC):
    """An engine of this process on an event loop of its own."""

    def __init__(self, engine: Engine, long: int, samples: bool) -> None:
        self.engine = engine
        self.prompt = [5, 6, 7]
        self.long = long
        self.samples = samples
        self.version = 1
        self._runner = asyncio.Runner()
        self.run(engine.load(self.state()))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(work, 60))

    def state(self) -> Served:
        return Served(self.version, {}, {}, "")

    async def advance(self) -> tuple[Served, AbstractSet[str]]:
        self.version += 1
        following = self.state()
        return following, following.state.keys()

    async def mend(self) -> Served:
        return self.state()

    @abstractmethod
    async def spoil(self) -> tuple[Served, AbstractSet[str]]: ...

    def end(self) -> None:
        self.run(self.engine.close())
        self._runner.close()


class FakeBench(LocalBench):
    def __init__(self) -> None:
        self.fake = FakeEngine(token_s=0.001)
        super().__init__(self.fake, 200, samples=False)

    async def spoil(self) -> tuple[Served, AbstractSet[str]]:
        self.fake.refuses.add(self.version + 1)
        return Served(self.version + 1, {}, {}, ""), frozenset()


class TorchBench(LocalBench):
    def __init__(self) -> None:
        super().__init__(TorchEngine(Decoder(ARCH)), 200, samples=True)

    def state(self) -> Served:
        return served(self.version)

    async def spoil(self) -> tuple[Served, AbstractSet[str]]:
        """The last tensor has another shape."""
        bad = served(self.version + 1)
        last = list(bad.state)[-1]
        bad.state[last] = torch.zeros(1, dtype=torch.bfloat16)
        return bad, bad.state.keys()


@pytest.fixture(params=[FakeBench, TorchBench], ids=["fake", "torch"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made: LocalBench = request.param()
    yield made
    made.end()


@pytest.fixture
def closing(bench: Bench) -> Bench:
    return bench


class TestEngines(EngineConformance):
    pass
