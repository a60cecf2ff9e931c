"""What each process of a test's pipeline does: the same steps as `alone`, on its stage."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sprawl.config import RunConfig
from sprawl.policy import Architecture, Decoder
from sprawl.train.runtime.build import stage_trainer
from sprawl.train.runtime.mesh import Mesh
from sprawl.train.trainer import StepStats, Trainer
from tests.forking import context
from tests.train.helpers import HF_CONFIG, make_batch, make_config


@dataclass(frozen=True)
class Case:
    """Steps to train; `hf` and `sections` change the tiny model and its config, `policy` the stages."""

    name: str
    policy: dict[str, Any] = field(default_factory=dict)
    hf: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    signs: bool = False
    broken: bool = False  # the second batch has a reward that is not a number

    def config(self, runtime: str) -> RunConfig:
        policy = {"base": "unused", "stages": 4, **self.policy, "runtime": runtime}
        if runtime == "single":
            policy.pop("replicas", None)
        return make_config(**{**self.sections, "policy": policy})

    @property
    def arch(self) -> Architecture:
        return Architecture.from_hf({**HF_CONFIG, **self.hf})


@dataclass(frozen=True)
class Outcome:
    """After the last step: weights, the gradients that the optimizer saw, codec state, and what every step measured."""

    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    codec: dict[str, torch.Tensor]
    stats: list[StepStats]


def models(case: Case) -> list[dict[str, torch.Tensor]]:
    """Masters and reference, a little apart, so that there is a KL."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        decoder = Decoder(case.arch)
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.3)
        found.append({name: p.detach().clone() for name, p in decoder.named_parameters()})
    return found


def run_steps(case: Case, trainer: Trainer) -> Outcome:
    signs = None
    if case.signs:
        shapes = Decoder(case.arch).shapes()
        generator = torch.Generator().manual_seed(5)
        signs = {name: torch.rand(shape, generator=generator) < 0.5 for name, shape in shapes.items()}
    stats = []
    for step in range(1, case.steps + 1):
        batch = make_batch(step, groups=4, step=step)
        if case.broken and step == 2:
            batch.rewards[5] = float("nan")
        stats.append(trainer.step(step, batch, signs))
    named = dict(trainer.decoder.named_parameters())
    return Outcome(
        {name: p.detach().clone() for name, p in named.items()},
        {name: p.grad.clone() for name, p in named.items() if p.grad is not None},
        trainer.codec.state(),
        stats,
    )


def alone(case: Case) -> Outcome:
    masters, reference = models(case)
    decoder, frozen = Decoder(case.arch), Decoder(case.arch)
    decoder.load_served(masters, torch.float32)
    config = case.config("single")
    frozen.load_served(reference, getattr(torch, config.policy.compute_dtype))
    return run_steps(case, Trainer(decoder, frozen, config))


def together(case: Case) -> Outcome:
    masters, reference = models(case)
    config = case.config("multi")
    return run_steps(case, stage_trainer(Mesh(config.policy, case.arch), case.arch, masters, reference, config))


def main(rank: int, world: int, port: int, cases: Sequence[Case], out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        for case in cases:
            torch.save(together(case), out / f"{case.name}-{rank}.pt")
    except BaseException:
        (out / f"error-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
    dist.destroy_process_group()


def launch(world: int, cases: Sequence[Case], out: Path) -> None:
    """Run all cases in `world` processes; raises with the first traceback when one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context().Process(target=main, args=(rank, world, port, cases, out)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    for process in processes:
        if process.is_alive():
            process.kill()
    errors = [path.read_text() for path in sorted(out.glob("error-*.txt"))]
    if errors or any(process.exitcode for process in processes):
        raise AssertionError("\n".join(errors) or f"exit codes {[process.exitcode for process in processes]}")


def outcomes(case: Case, world: int, out: Path) -> list[Outcome]:
    return [torch.load(out / f"{case.name}-{rank}.pt", weights_only=False) for rank in range(world)]
