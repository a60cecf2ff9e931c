"""A published run of a small model, the checkpoint an island keeps of it, and vLLM on that checkpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Coroutine, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch

from sprawl.board.commit import CommitOptions
from sprawl.board.local_copy import LocalCopy
from sprawl.board.publisher import Publisher
from sprawl.board.reader import Served, VersionReader
from sprawl.board.store import MemoryStore
from sprawl.delta.state import State, clone_state
from sprawl.policy import Architecture, Decoder
from sprawl.rollout.engine import EngineLimits
from sprawl.rollout.host_copy import DiskCopy
from sprawl.rollout.vllm import KEEP_PLAIN
from sprawl.rollout.vllm.engine import VllmEngine
from sprawl.rollout.vllm.server import ServerOptions
from sprawl.rollout.vllm.supervisor import WatchdogOptions
from sprawl.rollout.wire import Sample, SamplingParams
from tests.rollout.support import hold, step

RUN = "run-1"
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
ARGUMENTS = ("--enforce-eager", "--max-num-seqs", "16", "--disable-log-stats")


def config(tied: bool) -> dict[str, Any]:
    """A Qwen2 with everything that fused layers have: grouped queries, biases; no token ends a sample."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 96,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def random_state(settings: dict[str, Any], seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: p.shape for name, p in Decoder(Architecture.from_hf(settings)).state_dict().items()}
    state = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        state[name] = (1 + 0.1 * noise if "norm" in name else 0.08 * noise).bfloat16()
    return state


def moved(state: State, version: int, share: float = 0.05, scale: float = 0.1) -> State:
    """The next state: some tensors change, and in them a share of the elements. Which ones depends on the version."""
    generator = torch.Generator().manual_seed(1000 + version)
    names = sorted(state)
    match version % 4:
        case 1:  # one part of each fused layer, weights and biases apart
            chosen = [n for n in names if n.endswith(("k_proj.weight", "v_proj.bias", "up_proj.weight"))]
        case 2:  # the embedding, and the head where there is one
            chosen = [n for n in names if "embed_tokens" in n or "lm_head" in n]
        case 3:
            chosen = names
        case _:
            chosen = [n for i, n in enumerate(names) if (i + version) % 3 == 0]
    following = clone_state(state)
    for name in chosen:
        tensor = following[name]
        hit = torch.rand(tensor.shape, generator=generator) < share
        noise = (torch.randn(tensor.shape, generator=generator) * scale).bfloat16()
        following[name] = torch.where(hit, tensor + noise, tensor)
    return following


class VllmBench:
    """See `tests.rollout.conformance.Bench`. `snapshots` of the checkpoint are kept for servers to be started on."""

    def __init__(
        self,
        directory: Path,
        settings: dict[str, Any],
        state: State,
        *,
        dtype: str = "bfloat16",
        watchdog: WatchdogOptions | None = None,
        share: float = 0.05,
        arguments: tuple[str, ...] = (),
        plain: bool = False,
    ) -> None:
        """`plain`: vLLM keeps its weights as they are, as it does on a GPU."""
        self.prompt = [5, 6, 7]
        self.long = 300
        self.samples = True
        self.version = 0
        self.share = share
        self.directory = directory
        self.settings = settings
        self.store = MemoryStore()
        files = {"config.json": json.dumps(settings).encode()}
        self.publisher = Publisher(self.store, RUN, CommitOptions(keyframe_every=100, dtype="bfloat16", files=files))
        self.reader = VersionReader(self.store, RUN)
        self.state = state
        self.publisher.publish(0, 0, state)
        self.copy = DiskCopy(directory / "checkpoint", RUN, files)
        self.served = hold(self.copy, self.reader, 0)
        self.dtype = dtype
        self.watchdog = watchdog
        self.arguments = (*ARGUMENTS, *arguments)
        self.environment = ENVIRONMENT | ({KEEP_PLAIN: "1"} if plain else {})
        self.engine = self.new_engine(directory / "checkpoint")
        self._runner = asyncio.Runner()

    def new_engine(self, checkpoint: Path) -> VllmEngine:
        limits = EngineLimits(self.settings["vocab_size"], self.settings["max_position_embeddings"], 1 << 20)
        options = ServerOptions(self.dtype, 1, self.arguments, environment=self.environment)
        log_file = self.directory / "vllm.log"
        return VllmEngine(checkpoint, limits, options=options, watchdog=self.watchdog, log_file=log_file)

    def run(self, work: Coroutine[Any, Any, Any], limit_s: float = 1200.0) -> Any:
        return self._runner.run(asyncio.wait_for(work, limit_s))

    def publish(self, state: State) -> None:
        version = self.version + 1
        self.publisher.publish(version, version, state)
        self.state = state

    async def step(self, stage: bool = True) -> tuple[Served, AbstractSet[str]]:
        """As an island does it; without `stage` the engine learns nothing before it is paused."""
        prepared = self.reader.prepare(self.served, self.version + 1)
        self.copy.stage(self.reader, prepared)
        if stage:
            await self.engine.stage(prepared.manifest.root_digest)
        self.served = self.copy.commit(self.reader)
        self.copy.settle()
        return self.served, set(prepared.changed)

    async def advance(self) -> tuple[Served, AbstractSet[str]]:
        self.publish(moved(self.state, self.version + 1, self.share))
        step = await self.step()
        self.version += 1
        return step

    async def spoil(self) -> tuple[Served, AbstractSet[str]]:
        """Weights that are no numbers, on a board of their own."""
        bad = clone_state(self.state)
        bad["model.norm.weight"].fill_(float("nan"))
        store = MemoryStore()
        for key in self.store.list(""):
            store.put(key, self.store.get(key))
        publisher = Publisher(store, RUN, CommitOptions(keyframe_every=100, dtype="bfloat16"))
        publisher.publish(self.version + 1, self.version + 1, bad)
        reader = VersionReader(store, RUN)
        prepared = reader.prepare(self.served, self.version + 1)
        self.served = step(self.copy, reader, prepared)
        return self.served, set(prepared.changed)

    async def mend(self) -> Served:
        self.served = hold(self.copy, self.reader, self.version)
        return self.served

    def snapshot(self) -> Path:
        """A copy of the checkpoint as it is."""
        target = self.directory / f"version-{self.version}"
        shutil.copytree(self.directory / "checkpoint", target)
        return target

    def end(self) -> None:
        self.run(self.engine.close())
        self._runner.close()
        self.copy.close()


PROMPTS: Sequence[list[int]] = ([5, 6, 7], [9], [(7 * i) % 90 + 1 for i in range(300)])


async def fingerprint(engine: VllmEngine, new_tokens: int = 12) -> list[Sample]:
    """Tokens and log-probs of a fixed set of requests, one after another: greedy and sampled, short prompts and one
    that fills several cache blocks, twice."""
    found = []
    for prompt in (*PROMPTS, PROMPTS[-1]):
        for params in (
            SamplingParams(max_new_tokens=new_tokens, temperature=0),
            SamplingParams(max_new_tokens=new_tokens, temperature=1.0, seeds=[17]),
            SamplingParams(max_new_tokens=new_tokens, temperature=0.7, seeds=[2**33]),
        ):
            found += await engine.generate(prompt, params)
    return found


async def fresh_fingerprint(bench: VllmBench, checkpoint: Path) -> list[Sample]:
    """Of a server that was never anything else."""
    copy = LocalCopy.open(checkpoint)
    assert copy is not None
    engine = bench.new_engine(checkpoint)
    try:
        await engine.load(copy.served)
        return await fingerprint(engine)
    finally:
        await engine.close()
