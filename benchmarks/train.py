"""A trainer step whose stages are processes behind slow links: seconds and bytes, by codec and bandwidth.

    python -m benchmarks.train            8 stages, 80 Mbit/s, 1 Gbit/s and unlimited
    python -m benchmarks.train --quick    4 stages, 80 Mbit/s and 1 Gbit/s, under a minute

The model, batch and step are those of configs/tiny.yaml (probes of the compressed KL included, as in every step). Each
stage is a process in a network namespace of its own, and what it sends is limited by `tc tbf`; the floor is the same
step by one process without a wire. Bytes are what the trainer handed to its sockets, and what the kernel counted at the
stages' devices. Latency is not simulated: only bandwidth is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.links import DEVICE, linked, missing, sent_bytes
from benchmarks.tiny import sample_batch, tiny_model
from sprawl.config import RunConfig, load_config
from sprawl.rollout.trajectories import RolloutBatch, from_bytes, to_bytes
from sprawl.train.runtime.build import stage_trainer
from sprawl.train.runtime.mesh import Mesh
from sprawl.train.trainer import Trainer

CODECS = ("dense", "prf", "quantized-prf")
PORT = 29511


@dataclass(frozen=True)
class Measured:
    """One codec over one link; seconds are the fastest step's, bytes those of a step, all stages together.

    wire_seconds: what the busiest stage sends, at the link's bandwidth; no step can be faster, whatever the processors.
    """

    codec: str
    mbit: float | None
    stages: int
    seconds: float
    payload_bytes: int
    padding_bytes: int
    kernel_bytes: int
    wire_seconds: float
    floor_seconds: float


def configured(codec: str, stages: int) -> RunConfig:
    changes = [
        f"boundary.codec={codec}",
        f"policy.stages={stages}",
        "grpo.microbatch_rows=16",  # 16 microbatches keep 8 stages busy
        "probe.gradient_every=0",
        "probe.every=1000000",
    ]
    return load_config("configs/tiny.yaml", changes)


def timed(trainer: Trainer, batch: RolloutBatch, steps: int, sent: Callable[[], int]) -> dict[str, float]:
    """Seconds of the fastest step (others work on this machine too), payload bytes of a step of the whole trainer, and
    what `sent` grew by here.

    Two steps before them: buffers, compiled kernels, the dense views of step 1.
    """
    for step in (1, 2):
        trainer.step(step, batch, None)
    seconds, payload, padding, before = [], 0, 0, sent()
    for step in range(3, 3 + steps):
        began = time.perf_counter()
        stats = trainer.step(step, batch, None)
        seconds.append(time.perf_counter() - began)
        payload, padding = stats.wire.sent + stats.probe_bytes, stats.wire.padding
    kernel = (sent() - before) / steps
    return {"seconds": min(seconds), "payload": payload, "padding": padding, "kernel": kernel}


def serve_rank(rank: int, stages: int, steps: int, place: Path) -> None:
    """One stage: all codecs, one after another; writes what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=stages, timeout=timedelta(seconds=300))
    batch = from_bytes((place / "batch").read_bytes(), "batch")
    results: dict[str, dict[str, float]] = {}
    for codec in CODECS:
        config = configured(codec, stages)
        model = tiny_model(config)[0]
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        trainer = stage_trainer(Mesh(config.policy, model.arch), model.arch, weights, weights, config)
        results[codec] = timed(trainer, batch, steps, sent_bytes)
    (place / f"rank-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def run_link(stages: int, mbit: float | None, steps: int, batch: bytes) -> list[dict[str, dict[str, float]]]:
    """All codecs over one kind of link; a dict a rank."""
    with tempfile.TemporaryDirectory() as folder, linked(stages, mbit) as ends:
        place = Path(folder)
        (place / "batch").write_bytes(batch)
        environment = {
            **os.environ,
            "MASTER_ADDR": ends[0].address,
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": "1",
        }
        settings = ["--stages", str(stages), "--steps", str(steps), "--place", folder]
        processes = [
            subprocess.Popen(
                end.argv([sys.executable, "-m", "benchmarks.train", "--rank", str(rank), *settings]), env=environment
            )
            for rank, end in enumerate(ends)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"stages ended with codes {codes}")
        return [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(stages)]


def measure(stages: int, rates: list[float | None], steps: int) -> list[Measured]:
    config = configured("prf", stages)
    model, tokenizer = tiny_model(config)
    batch = sample_batch(config, model, tokenizer, 1)
    floor = configured("dense", stages)
    alone = Trainer(tiny_model(floor)[0], tiny_model(floor)[0], floor)
    floor_seconds = timed(alone, batch, steps, lambda: 0)["seconds"]
    found = []
    for rate in rates:
        ranks = run_link(stages, rate, steps, to_bytes(batch))
        for codec in CODECS:
            first = ranks[0][codec]
            kernel = [rank[codec]["kernel"] for rank in ranks]
            found.append(
                Measured(
                    codec,
                    rate,
                    stages,
                    first["seconds"],
                    int(first["payload"]),
                    int(first["padding"]),
                    int(sum(kernel)),
                    0.0 if rate is None else max(kernel) * 8 / (rate * 1e6),
                    floor_seconds,
                )
            )
    return found


def table(results: list[Measured]) -> str:
    lines = [
        "| link | codec | s/step | against dense | against one process | wire alone | sent | kernel | overhead |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        dense = next(r for r in results if r.mbit == result.mbit and r.codec == "dense")
        link = "unlimited" if result.mbit is None else f"{result.mbit:g} Mbit/s"
        kernel = result.kernel_bytes
        lines.append(
            f"| {link} | {result.codec} | {result.seconds:.2f} | {dense.seconds / result.seconds:.1f} x | "
            f"{result.seconds / result.floor_seconds:.1f} x | {result.wire_seconds:.2f} s | "
            f"{result.payload_bytes / 1e6:.2f} MB | "
            f"{kernel / 1e6:.2f} MB | {kernel / result.payload_bytes - 1:+.1%} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 stages, two links, fewer steps")
    parser.add_argument("--stages", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None, help="timed steps")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    stages = options.stages or (4 if options.quick else 8)
    steps = options.steps or (3 if options.quick else 6)
    if options.rank is not None:
        serve_rank(options.rank, stages, steps, options.place)
        return 0
    if (reason := missing()) is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    rates: list[float | None] = [80.0, 1000.0] if options.quick else [80.0, 1000.0, None]
    results = measure(stages, rates, steps)
    if options.json:
        document: dict[str, Any] = {"stages": stages, "results": [asdict(result) for result in results]}
        print(json.dumps(document, indent=2))
    else:
        print(f"{stages} stages, one process each; one process without a wire: {results[0].floor_seconds:.2f} s/step\n")
        print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
