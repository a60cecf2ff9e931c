"""The trainer as the session sees it: one port, and the adapter for a trainer that is this process alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from sprawl.board.commit import CommitOptions
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.receipts import PublishReceipt
from sprawl.delta.state import State, root_digest, served_view, tensor_digests
from sprawl.errors import SprawlError
from sprawl.policy import Decoder
from sprawl.policy.checkpoint import served_files
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.run.base_model import BaseModel
from sprawl.run.opening import TakenRun
from sprawl.run.signs import SignMaps
from sprawl.train.chains import MastersWriter
from sprawl.train.checkpoint import restore, save_checkpoint
from sprawl.train.masters import DeltaPlan
from sprawl.train.steering import Steering
from sprawl.train.trainer import StepStats, Trainer


class RunTrainer(Protocol):
    """Trains, publishes and checkpoints one run. Weights live behind it, in one process or in many."""

    def train(self, step: int, batch: RolloutBatch, signs: SignMaps, steering: Steering) -> StepStats:
        """As `sprawl.train.trainer.Trainer.step`, corrected by the sign map in force."""

    def publish(self, version: int, extra: Mapping[str, Any]) -> PublishReceipt:
        """Publish the present weights. Idempotent; raises as `sprawl.board.publisher.Publisher.publish`."""

    def adopt(self, version: int) -> tuple[str, str]:
        """Make the next delta against `version`, which is on the board. Returns the root digest of the weights that
        are here and of those that were published; where they differ the published ones are the base."""

    def checkpoint(self, step: int) -> None:
        """Write the checkpoint of `step` unless it is committed."""

    def restore(self, step: int) -> None:
        """Go back to a committed checkpoint."""

    def check(self) -> None:
        """Raises SprawlError when the trainer is known to be broken."""

    def describe_boundary(self) -> str:
        """One phrase for people."""

    def close(self) -> None:
        """Idempotent."""


def published_root(reader: VersionReader, version: int) -> str:
    """Raises SprawlError when the version is not on the board."""
    manifest = reader.manifest(version)
    if manifest is None:
        raise SprawlError(f"version {version} is gone from the board")
    return manifest.root_digest


def commit_options(run: TakenRun, base: BaseModel) -> CommitOptions:
    """How this trainer commits its versions."""
    publish = run.config.publish
    return CommitOptions(
        keyframe_every=publish.keyframe_every,
        dtype=publish.dtype,
        epoch=run.epoch,
        writer=f"trainer-{run.epoch}",
        files=served_files(base.files, publish.dtype, base.weights),
        signer=run.signer,
    )


class SingleProcess:
    """All stages in this process; boundaries are tensors that only payloads cross."""

    def __init__(self, run: TakenRun, base: BaseModel) -> None:
        config = run.config
        self._run = run
        self._reader = VersionReader(run.store, run.run_id, trust=run.trust)
        decoder, reference = Decoder(base.arch), Decoder(base.arch)
        decoder.load_served(base.weights, torch.float32)
        # The reference is version 0 as it is served; it is never trained, so it needs no fp32 copy under autocast.
        reference.load_served(base.reference(config), getattr(torch, config.policy.compute_dtype))
        reference.requires_grad_(False)
        self._trainer = Trainer(decoder, reference, config)
        self._masters = MastersWriter(run.store, run.ledger, DeltaPlan.of(config), threads=config.threads.trainer)
        self._publisher = Publisher(run.store, run.run_id, commit_options(run, base))

    def train(self, step: int, batch: RolloutBatch, signs: SignMaps, steering: Steering) -> StepStats:
        self._trainer.use_bases(signs.bases)
        return self._trainer.step(step, batch, signs.signs, steering)

    def publish(self, version: int, extra: Mapping[str, Any]) -> PublishReceipt:
        return self._publisher.publish(version, version, self._served(), extra=dict(extra))

    def adopt(self, version: int) -> tuple[str, str]:
        state = self._served()
        here, published = root_digest(tensor_digests(state)), published_root(self._reader, version)
        self._publisher.resume(state if here == published else None, version)
        return here, published

    def checkpoint(self, step: int) -> None:
        trainer, place = self._trainer, (self._run.store, self._run.ledger, step, self._run.epoch)
        save_checkpoint(*place, trainer.decoder, trainer.optimizer, trainer.codec, self._masters)

    def restore(self, step: int) -> None:
        trainer = self._trainer
        restore(self._run.store, self._run.ledger, step, trainer.decoder, trainer.optimizer, trainer.codec)

    def check(self) -> None:
        pass

    def describe_boundary(self) -> str:
        hidden = self._trainer.decoder.arch.hidden
        return f"{self._trainer.codec.describe(hidden)} at {self._run.config.policy.stages - 1} boundaries"

    def close(self) -> None:
        pass

    def _served(self) -> State:
        masters = {name: p.detach() for name, p in self._trainer.decoder.named_parameters()}
        return served_view(masters, self._run.config.publish.dtype)
