"""The adapter for a trainer of many processes: rank 0 says what comes next, every process reads batch and sign map from
the board itself, and rank 0 commits what all of them wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from sprawl.board.parts import Part, PartCommitter
from sprawl.board.reader import VersionReader
from sprawl.board.receipts import PublishReceipt
from sprawl.delta.state import root_digest
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.run.base_model import BaseModel
from sprawl.run.launch import drive
from sprawl.run.opening import TakenRun
from sprawl.run.signs import SignMaps
from sprawl.run.stage_share import StageShare
from sprawl.run.trainers import RunTrainer, SingleProcess, commit_options, published_root
from sprawl.train.checkpoint import Shard, commit_checkpoint
from sprawl.train.runtime.control import Message
from sprawl.train.steering import Steering
from sprawl.train.trainer import StepStats

T = TypeVar("T")


def open_trainer(run: TakenRun, base: BaseModel) -> RunTrainer:
    """The trainer that `policy.runtime` names."""
    return SingleProcess(run, base) if run.config.policy.processes == 1 else MultiProcess(run, base)


class MultiProcess:
    """Rank 0 of a pipeline of processes; see `sprawl.run.trainers.RunTrainer`.

    Every method raises StageLost when a process is gone, naming it. Nothing is committed then, and the run resumes
    from its board.
    """

    def __init__(self, run: TakenRun, base: BaseModel) -> None:
        self._run = run
        self._reader = VersionReader(run.store, run.run_id, trust=run.trust)
        policy, threads = run.config.policy, run.config.threads.trainer
        self._driver, self._ranks = drive(policy.processes, policy.stages, run.log_dir, threads, policy.liveness_s)
        self._closed = False

        def opened() -> StageShare:
            return StageShare(run.config, run.store, run.ledger, base, run.trust)

        opening = {"do": "open", "board": run.board, "run_id": run.run_id, "epoch": run.epoch}
        try:
            self._share = self._everywhere(opening, "opening", opened)[0]
        except BaseException:
            self.close()
            raise
        self._committer = PartCommitter(run.store, run.run_id, commit_options(run, base))

    def train(self, step: int, batch: RolloutBatch, signs: SignMaps, steering: Steering) -> StepStats:
        command = {"do": "train", "step": step, "fire": signs.fire, "steering": steering.as_dict()}

        def mine() -> StepStats:
            return self._share.train(step, batch, signs, steering)

        return self._everywhere(command, f"train step {step}", mine)[0]

    def publish(self, version: int, extra: Mapping[str, Any]) -> PublishReceipt:
        command = {"do": "publish", "version": version}
        mine, answers = self._everywhere(command, f"publish {version}", lambda: self._share.write_part(version))
        parts = [Part.from_json(answer["part"]) for answer in answers if answer["part"] is not None]
        return self._committer.commit(
            version, version, [part for part in (mine, *parts) if part is not None], extra=dict(extra)
        )

    def adopt(self, version: int) -> tuple[str, str]:
        mine, answers = self._everywhere({"do": "digests"}, f"adopt {version}", self._share.digests)
        digests = dict(mine)
        for answer in answers:
            digests.update(answer["digests"])
        here, published = root_digest(digests), published_root(self._reader, version)
        if here == published:
            command = {"do": "adopt", "version": version}
            self._everywhere(command, f"adopt {version}", lambda: self._share.adopt(version))
        return here, published

    def checkpoint(self, step: int) -> None:
        if self._run.ledger.checkpoint(step) is not None:
            return
        command = {"do": "checkpoint", "step": step}
        mine, answers = self._everywhere(command, f"checkpoint {step}", lambda: self._share.write_shard(step))
        shards = [mine, *(Shard.from_message(answer) for answer in answers)]
        commit_checkpoint(self._run.ledger, step, self._run.epoch, shards)

    def restore(self, step: int) -> None:
        self._everywhere({"do": "restore", "step": step}, f"restore {step}", lambda: self._share.restore(step))

    def check(self) -> None:
        self._driver.check()

    def describe_boundary(self) -> str:
        policy, trainer = self._run.config.policy, self._share.trainer
        text = f"{trainer.codec.describe(trainer.decoder.arch.hidden)} at {policy.stages - 1} boundaries"
        pipelines = f", {policy.replicas} replicas" if policy.replicas > 1 else ""
        return f"{text} between {policy.processes} processes{pipelines}"

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._driver.close()
        self._ranks.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _everywhere(self, command: Message, doing: str, mine: Callable[[], T]) -> tuple[T, list[Message]]:
        """A command to all others, its equivalent here, and their answers."""
        with self._explained():
            self._driver.send(command, doing)
            result = mine()
            return result, self._driver.collect()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A collective fails in many words when its neighbours are gone; who was lost, and when, is one line."""
        try:
            yield
        except RuntimeError as error:
            lost = self._driver.cause(error)
            if lost is None:
                raise
            raise lost from None
