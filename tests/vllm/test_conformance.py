"""vLLM, held to what every engine must show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rollout.conformance import EngineConformance
from tests.vllm.bench import VllmBench, config, random_state


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBench]:
    made = VllmBench(tmp_path_factory.mktemp("vllm"), config(tied=True), random_state(config(tied=True)))
    made.run(made.engine.load(made.served))
    yield made
    made.end()


@pytest.fixture
def closing(bench: VllmBench) -> VllmBench:
    """The last test of the module: nothing needs the server any more."""
    return bench


class TestVllm(EngineConformance):
    pass
