"""Throughput of the embedded engine: continuous batching against one group at a time (`benchmarks/lockstep.py`).

    python -m benchmarks.engine [--quick] [--json]

Random weights, so every sample has its full length, which is the best case of lockstep: no row idles in its batch.
Both ways run in turns in one process; what counts is the ratio.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import click
import torch

from benchmarks import lockstep
from sprawl.board.reader import Served
from sprawl.policy import Architecture, Decoder
from sprawl.rollout.torch_engine import TorchEngine
from sprawl.rollout.wire import SamplingParams

TINY = {  # the model of configs/tiny.yaml
    "model_type": "qwen2",
    "vocab_size": 16,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SMALL = {  # the shapes of SmolLM2-135M
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
MODELS = {"tiny": TINY, "135M": SMALL}


@dataclass(frozen=True)
class Case:
    model: str
    dtype: str
    requests: int  # at once
    samples: int  # of each
    prompt: int
    new_tokens: int


@dataclass(frozen=True)
class Row:
    case: Case
    lockstep_tokens_per_s: float
    continuous_tokens_per_s: float
    ratio: float  # median of the ratios of neighbouring runs
    least: float
    most: float


def cases(model: str, dtype: str, quick: bool) -> list[Case]:
    """The run's own shape first (16 samples of short answers), then longer ones and single samples."""
    if quick and model != "tiny":
        return [Case(model, dtype, 1, 16, 8, 3), Case(model, dtype, 4, 16, 8, 3)]
    longer = 32 if model == "tiny" else 12
    return [
        Case(model, dtype, 1, 16, 8, 6),
        Case(model, dtype, 4, 16, 8, 6),
        Case(model, dtype, 1, 16, 24, longer),
        Case(model, dtype, 4, 16, 24, longer),
        Case(model, dtype, 16, 1, 24, longer),
        Case(model, dtype, 1, 1, 24, longer),
    ]


class Pair:
    """Both ways with the same random weights."""

    def __init__(self, model: str, dtype: str) -> None:
        torch.manual_seed(0)
        decoder = Decoder(Architecture.from_hf(MODELS[model])).eval()
        state = {name: parameter.detach().bfloat16() for name, parameter in decoder.named_parameters()}
        self.engine = TorchEngine(decoder, compute_dtype=dtype)
        self.decoder = decoder
        self._loop = asyncio.Runner()
        self._loop.run(self.engine.load(Served(0, state, {}, "")))

    def continuous(self, case: Case) -> None:
        async def all_at_once() -> None:
            await asyncio.gather(
                *(
                    self.engine.generate(
                        prompt(case, r),
                        SamplingParams(n=case.samples, max_new_tokens=case.new_tokens, seeds=seeds(case, r)),
                    )
                    for r in range(case.requests)
                )
            )

        self._loop.run(all_at_once())

    def lockstep(self, case: Case) -> None:
        for r in range(case.requests):
            lockstep.generate(self.decoder, prompt(case, r), seeds(case, r), case.new_tokens)

    def close(self) -> None:
        self._loop.run(self.engine.close())
        self._loop.close()


def prompt(case: Case, request: int) -> list[int]:
    return [(request + i) % 15 + 1 for i in range(case.prompt)]


def seeds(case: Case, request: int) -> list[int]:
    return [request * case.samples + i for i in range(case.samples)]


def timed(work: Callable[[Case], None], case: Case) -> float:
    began = time.perf_counter()
    work(case)
    return time.perf_counter() - began


def measure(pair: Pair, case: Case, budget_s: float) -> Row:
    """Alternate until the budget is spent, at least twice."""
    for work in (pair.lockstep, pair.continuous):
        work(case)
    rounds: list[tuple[float, float]] = []
    end = time.perf_counter() + budget_s
    while len(rounds) < 2 or time.perf_counter() < end:
        rounds.append((timed(pair.lockstep, case), timed(pair.continuous, case)))
    ratios = [a / b for a, b in rounds]
    tokens = case.requests * case.samples * case.new_tokens
    return Row(
        case=case,
        lockstep_tokens_per_s=tokens / statistics.median(a for a, _ in rounds),
        continuous_tokens_per_s=tokens / statistics.median(b for _, b in rounds),
        ratio=statistics.median(ratios),
        least=min(ratios),
        most=max(ratios),
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="A small run: under 60 s.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of torch.")
def engine(quick: bool, as_json: bool, threads: int) -> None:
    """Measure continuous batching against one group at a time."""
    torch.set_num_threads(threads)
    models = [("tiny", "float32"), ("135M", "bfloat16")] + ([] if quick else [("135M", "float32")])
    rows: list[Row] = []
    for model, dtype in models:
        pair = Pair(model, dtype)
        rows += [measure(pair, case, 1.0 if quick else 8.0) for case in cases(model, dtype, quick)]
        pair.close()
    if as_json:
        click.echo(json.dumps({"threads": threads, "rows": [asdict(row) for row in rows]}))
        return
    click.echo("| model | requests x samples | prompt + new | lockstep | continuous | ratio (least - most) |")
    click.echo("|---|---|---|---|---|---|")
    for row in rows:
        case = row.case
        click.echo(
            f"| {case.model} {case.dtype} | {case.requests} x {case.samples} | {case.prompt} + {case.new_tokens} | "
            f"{row.lockstep_tokens_per_s:.0f} tok/s | {row.continuous_tokens_per_s:.0f} tok/s | "
            f"{row.ratio:.2f} ({row.least:.2f} - {row.most:.2f}) |"
        )


if __name__ == "__main__":
    engine()
