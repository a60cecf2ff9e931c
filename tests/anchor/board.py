"""Boards as a trainer leaves them, by real training of the small model: versions, rollouts, checkpoints; no fires."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from sprawl.board import keys
from sprawl.board.commit import CommitOptions
from sprawl.board.ledger import Ledger
from sprawl.board.publisher import Publisher
from sprawl.board.records import RunRecord
from sprawl.board.store import Store
from sprawl.config import RunConfig
from sprawl.delta.state import served_view
from sprawl.policy.checkpoint import served_files
from sprawl.rollout.trajectories import RolloutBatch, to_bytes
from sprawl.train.chains import MastersWriter
from sprawl.train.checkpoint import save_checkpoint
from sprawl.train.masters import DeltaPlan
from sprawl.train.trainer import Trainer
from tests.train.helpers import HF_CONFIG, make_batch, make_config, make_decoder

RUN = "run"
STALENESS = 1


def sampled_for(step: int) -> RolloutBatch:
    """What version max(0, step - 2) sampled for a step."""
    version = torch.full((12,), max(0, step - 1 - STALENESS), dtype=torch.int32)
    return replace(make_batch(step, step=step), version_start=version, version_end=version.clone())


def anchor_config(steps: int = 12, checkpoint: Mapping[str, Any] | None = None, **anchor: Any) -> RunConfig:
    return make_config(
        steps=steps,
        anchor={"every": 4, "lag": 4, **anchor},
        checkpoint={"every": 2, "whole_every": 3, **(checkpoint or {})},
        rollout={"prompts": 3, "samples": 4, "max_staleness": STALENESS},
    )


def trained(
    store: Store, config: RunConfig, batches: Callable[[int], RolloutBatch] = sampled_for
) -> Iterator[tuple[int, Trainer]]:
    """Train on the board step by step; yields after every step, 0 included, what it left there."""
    decoder = make_decoder()
    masters = {name: p.detach() for name, p in decoder.named_parameters()}
    ledger = Ledger(store, RUN)
    ledger.create_run(
        RunRecord(
            run_id=RUN,
            created_at=0.0,
            config=config.model_dump(mode="json"),
            base_digest="00",
            parameters=sum(tensor.numel() for tensor in masters.values()),
            sprawl_version="0",
        )
    )
    trainer = Trainer(decoder, make_decoder(), config)
    files = served_files({"config.json": json.dumps(HF_CONFIG).encode()}, "bfloat16", masters)
    publisher = Publisher(store, RUN, CommitOptions(keyframe_every=5, dtype="bfloat16", files=files))
    writer = MastersWriter(store, ledger, DeltaPlan.of(config))
    for step in range(config.steps + 1):
        if step:
            batch = batches(step)
            store.create(keys.rollouts(RUN, step), to_bytes(batch))
            trainer.step(step, batch, None)
        publisher.publish(step, step, served_view(masters, "bfloat16"), extra={})
        if step % config.checkpoint.every == 0 or step == config.steps:
            save_checkpoint(store, ledger, step, 1, decoder, trainer.optimizer, trainer.codec, writer)
        yield step, trainer


def make_board(
    store: Store, config: RunConfig, batches: Callable[[int], RolloutBatch] = sampled_for
) -> dict[int, dict[str, torch.Tensor]]:
    """A whole run without an anchor. Returns the fp32 masters after every step."""
    return {
        step: {name: p.detach().clone() for name, p in trainer.decoder.named_parameters()}
        for step, trainer in trained(store, config, batches)
    }
