"""How small are fp32 master checkpoints as deltas against an earlier one?

    python -m benchmarks.masters                          40 steps of configs/tiny.yaml in this process, a few minutes
    python -m benchmarks.masters --quick                  the same with a sixteenth of the samples, under a minute
    python -m benchmarks.masters --board runs --run ID    checkpoints of a run of your own as well

Masters move almost everywhere in every step, so no positions are saved: what is saved are the bits of each value that
its old one gives away. Compared, per number of optimizer steps between the two checkpoints:

- `delta`: what the trainer writes (`sprawl.train.masters`), decoded again and compared bit for bit.
- `xor + zstd-1`: the bits of old and new, xor-ed, bytes of equal weight together.
- `whole zstd-3`: the new ones alone, bytes of equal weight together; `whole zstd-1`: as they lie.

The trainer here is one process with the run's boundary codec and sign correction; the anchor's replay of step t - 20
happens in between. Sizes are shares of the plain fp32 bytes. Seconds are CPU time of this thread.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import click
import numpy as np
import torch
import zstandard

from benchmarks.command import run
from benchmarks.tiny import sample_batch, tiny_model
from sprawl.anchor.replay import fold, replay
from sprawl.board.ledger import Ledger, resolve_run
from sprawl.board.store import open_store
from sprawl.config import RunConfig, load_config
from sprawl.delta.state import State, clone_state, raw_bytes, state_bytes, tensor_digests
from sprawl.delta.whole import pack_tensor
from sprawl.errors import SprawlError
from sprawl.train.chains import MastersReader
from sprawl.train.masters import apply_masters, encode_masters
from sprawl.train.trainer import Trainer

T = TypeVar("T")

DISTANCES = (10, 20)
_QUICK = ["rollout.prompts=4", "rollout.samples=4", "grpo.microbatch_rows=16"]


@dataclass(frozen=True)
class Row:
    """Sizes as shares of `whole_bytes`; `distance`: optimizer steps between the two checkpoints; seconds of CPU."""

    source: str
    old: int
    new: int
    distance: int
    whole_bytes: int
    changed: float
    delta: float
    xor_zstd1: float
    whole_zstd3: float
    whole_zstd1: float
    encode_s: float
    apply_s: float


def timed(act: Callable[[], T]) -> tuple[T, float]:
    started = time.thread_time()
    return act(), time.thread_time() - started


def planes(words: np.ndarray) -> bytes:
    """Byte k of every word together."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.itemsize).T).tobytes()


def measure(source: str, steps: tuple[int, int], old: State, new: State) -> Row:
    """All forms of one pair. Raises SprawlError when the delta does not give the new masters bit for bit."""
    whole = state_bytes(new)
    blob, encode_s = timed(lambda: encode_masters(old, new))
    state = clone_state(old)
    _, apply_s = timed(lambda: apply_masters(state, blob, "delta"))
    if tensor_digests(state) != tensor_digests(new):
        raise SprawlError(f"{source}: the delta of {steps} does not rebuild the masters")
    before, after = (np.concatenate([raw_bytes(s[name]).view(np.uint32) for name in sorted(s)]) for s in (old, new))
    zstd = zstandard.ZstdCompressor(level=1)
    return Row(
        source,
        *steps,
        steps[1] - steps[0],
        whole,
        float((before != after).mean()),
        len(blob) / whole,
        len(zstd.compress(planes(before ^ after))) / whole,
        sum(len(frame) for tensor in new.values() for frame in pack_tensor(tensor)) / whole,
        len(zstd.compress(after.tobytes())) / whole,
        encode_s,
        apply_s,
    )


def train(config: RunConfig, steps: int, every: int) -> dict[int, State]:
    """Masters every `every` steps of a run in this process."""
    decoder, tokenizer = tiny_model(config)
    trainer = Trainer(decoder, tiny_model(config)[0].requires_grad_(False), config)
    kept: dict[int, State] = {}
    momentum, signs = None, None
    for step in range(steps + 1):
        if step:
            batch = sample_batch(config, decoder, tokenizer, step)
            trainer.step(step, batch, signs)
            if step % config.anchor.every == 0:
                stale = copy.deepcopy(decoder)
                stale.load_served(kept[step - config.anchor.every], torch.float32)
                momentum = fold(momentum, replay(stale, batch, config).gradients, config.anchor.fold)
                signs = {name: tensor >= 0 for name, tensor in momentum.items()}
        if step % every == 0:
            kept[step] = clone_state({name: p.detach() for name, p in decoder.named_parameters()})
    return kept


def pairs(masters: dict[int, State]) -> Iterator[tuple[int, int]]:
    """Checkpoints that are one of `DISTANCES` apart."""
    return ((old, old + distance) for distance in DISTANCES for old in sorted(masters) if old + distance in masters)


def from_run(board: str, run_id: str) -> list[Row]:
    """Neighbouring checkpoints of a run, and those two apart."""
    store = open_store(board)
    ledger = Ledger(store, resolve_run(store, run_id))
    steps, rows = ledger.checkpoints(), []
    reader = MastersReader(store, ledger)
    for apart in (1, 2):
        for old, new in zip(steps, steps[apart:], strict=False):
            rows.append(measure(ledger.run_id, (old, new), reader.read(old), reader.read(new)))
            reader.hold([new])
    return rows


def table(rows: list[Row]) -> str:
    """Markdown, a line for each source and distance: means over its pairs."""
    lines = [
        "| masters of | steps apart | pairs | changed | delta | xor + zstd-1 | whole zstd-3 | whole zstd-1 | "
        "encode, apply MB/s |",
        "|---" * 9 + "|",
    ]
    for source, distance in dict.fromkeys((row.source, row.distance) for row in rows):
        group = [row for row in rows if (row.source, row.distance) == (source, distance)]

        def mean(of: Callable[[Row], float], group: list[Row] = group) -> float:
            return sum(map(of, group)) / len(group)

        speeds = (mean(lambda r: r.whole_bytes / r.encode_s / 1e6), mean(lambda r: r.whole_bytes / r.apply_s / 1e6))
        lines.append(
            f"| {source} | {distance} | {len(group)} | {mean(lambda r: r.changed):.1%} | "
            f"{mean(lambda r: r.delta):.1%} | {mean(lambda r: r.xor_zstd1):.1%} | "
            f"{mean(lambda r: r.whole_zstd3):.1%} | {mean(lambda r: r.whole_zstd1):.1%} | "
            f"{speeds[0]:.0f}, {speeds[1]:.0f} |"
        )
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(path_type=Path), default=Path("configs/tiny.yaml"), show_default=True)
@click.option("--steps", type=click.IntRange(min=20), default=40, show_default=True, help="Optimizer steps to train.")
@click.option("--board", help="Board of a run whose checkpoints are measured as well.")
@click.option("--run", "run_id", default="latest", show_default=True, help="That run.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as one JSON list and nothing else on stdout.")
@click.option("--quick", is_flag=True, help="A sixteenth of the samples.")
def masters(config: Path, steps: int, board: str | None, run_id: str, as_json: bool, quick: bool) -> None:
    """Train, keep the masters every 10 steps, and measure them as deltas."""
    torch.set_num_threads(1)
    overrides = ["probe.gradient_every=0", f"probe.every={steps + 1}", *(_QUICK if quick else [])]
    settings = load_config(config, overrides)
    found = train(settings, steps, 10)
    measure("warm-up", (0, 0), found[0], found[10])  # compiles what is not compiled yet
    rows = [measure(settings.name, pair, found[pair[0]], found[pair[1]]) for pair in pairs(found)]
    if board is not None:
        rows += from_run(board, run_id)
    click.echo(json.dumps([asdict(row) for row in rows]) if as_json else table(rows))


if __name__ == "__main__":
    run(masters)
