"""A run on a local board whose model an island can really serve, and islands as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sprawl.board.commit import CommitOptions
from sprawl.board.ledger import Ledger
from sprawl.board.publisher import Publisher
from sprawl.board.records import RunRecord
from sprawl.board.store import open_store
from sprawl.delta.state import State
from sprawl.policy import Architecture, Decoder
from tests.rollout.support import CHARACTERS, EOS, RUN, character_tokenizer

CONFIG = {
    "model_type": "llama",
    "vocab_size": len(CHARACTERS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
}


class DiskRun:
    """A run on a local board with a model that an island can really serve."""

    def __init__(
        self,
        path: Path,
        run_id: str = RUN,
        config: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.run_id = run_id
        self.board = str(path)
        self.store = open_store(self.board, create=True)
        self.ledger = Ledger(self.store, run_id)
        self.ledger.create_run(
            RunRecord(
                run_id=run_id,
                created_at=time.time(),
                config={"rollout": {"follow": "eager", "compute_dtype": "float32"}, "threads": {"island": 1}},
                base_digest="",
                parameters=0,
                sprawl_version="0",
            )
        )
        files = {
            "config.json": json.dumps(config or CONFIG).encode(),
            "tokenizer.json": character_tokenizer()._fast.to_str().encode(),
        }
        if chat_template is not None:
            files["tokenizer_config.json"] = json.dumps({"chat_template": chat_template}).encode()
        self._publisher = Publisher(self.store, run_id, CommitOptions(keyframe_every=4, dtype="bfloat16", files=files))
        self._model = Decoder(Architecture.from_hf(CONFIG))
        self._next = 0
        self.state: State = {}

    def publish(self, **more: torch.Tensor) -> None:
        """Publish a version that shares nothing with the one before, nor with one of another run."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.run_id} {self._next}".encode()))
        state = {
            name: (torch.randn(parameter.shape, generator=generator) * 0.3).bfloat16()
            for name, parameter in self._model.state_dict().items()
        }
        self._put({**state, **more})

    def nudge(self) -> None:
        """Publish a version that differs a little from the one before."""
        generator = torch.Generator().manual_seed(self._next)
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        for tensor in state.values():
            flat = tensor.reshape(-1)
            where = torch.randint(0, flat.numel(), (max(1, flat.numel() // 50),), generator=generator)
            flat[where] *= 1.01
        self._put(state)

    def _put(self, state: State) -> None:
        self._publisher.publish(self._next, self._next, state)
        self.state = state
        self._next += 1


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPRAWL_")}
    return {**kept, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **more}


def command(run: DiskRun, *arguments: str, kind: str = "island") -> list[str]:
    return [sys.executable, "-m", "sprawl.cli", kind, "--board", run.board, *arguments]


@contextmanager
def process(argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        started = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=environment())
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def wait_for(found: Callable[[], Any], log: Path, limit_s: float = 60.0) -> Any:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError(f"did not happen within {limit_s} s; the log says:\n{log.read_text()}")
