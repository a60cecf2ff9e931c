"""A published run of a small model, the checkpoint an island keeps of it, and the fake SGLang on that checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from sprawl.rollout.engine import EngineLimits
from sprawl.rollout.sglang.engine import SglangEngine
from sprawl.rollout.vllm.server import ServerOptions
from tests.vllm.bench import VllmBench, config, random_state

FAKE = str(Path(__file__).parent / "fake")


class SglangBench(VllmBench):
    """See `tests.rollout.conformance.Bench`. `variables` go to the server."""

    engine: SglangEngine

    def __init__(self, directory: Path, variables: dict[str, str] | None = None, **more: object) -> None:
        self.variables = variables or {}
        super().__init__(directory, config(tied=True), random_state(config(tied=True)), **more)

    def new_engine(self, checkpoint: Path) -> SglangEngine:
        limits = EngineLimits(self.settings["vocab_size"], self.settings["max_position_embeddings"], 1 << 20)
        path = os.pathsep.join([FAKE, *filter(None, [os.environ.get("PYTHONPATH")])])
        options = ServerOptions(self.dtype, environment={"PYTHONPATH": path, **self.variables}, start_timeout_s=60.0)
        log_file = self.directory / "sglang.log"
        return SglangEngine(checkpoint, limits, options=options, watchdog=self.watchdog, log_file=log_file)
