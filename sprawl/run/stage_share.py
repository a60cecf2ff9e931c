"""What one process of a pipeline does for the run: its stage's steps, its tensors of every version and checkpoint."""

from __future__ import annotations

import torch

from sprawl.board.ledger import Ledger
from sprawl.board.parts import Part, PartWriter
from sprawl.board.signing import Trust
from sprawl.board.store import Store
from sprawl.config import RunConfig
from sprawl.delta.state import State, served_view, tensor_digests
from sprawl.policy.stage import owned_names, stage_decoder
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.run.base_model import BaseModel
from sprawl.run.signs import SignMaps
from sprawl.train.chains import MastersWriter
from sprawl.train.checkpoint import Shard, restore, write_shard
from sprawl.train.masters import DeltaPlan
from sprawl.train.runtime.build import stage_trainer
from sprawl.train.runtime.mesh import Mesh
from sprawl.train.steering import Steering
from sprawl.train.trainer import StepStats


class StageShare:
    """Rank 0 has one like all others; replicas but the first train and have nothing to write."""

    def __init__(self, config: RunConfig, store: Store, ledger: Ledger, base: BaseModel, trust: Trust | None) -> None:
        self._config, self._store, self._ledger = config, store, ledger
        self._mesh = Mesh(config.policy, base.arch)
        mine = base.part({name for name, _ in stage_decoder(base.arch, self._mesh.place).named_parameters()})
        self.trainer = stage_trainer(self._mesh, base.arch, mine.weights, mine.reference(config), config)
        self._names = owned_names(self.trainer.decoder, self._mesh.place)
        plan, threads = DeltaPlan.of(config), config.threads.trainer
        self._masters = MastersWriter(store, ledger, plan, self._mesh.place, threads=threads)
        self._writer = PartWriter(
            store,
            ledger.run_id,
            writer=f"stage-{self._mesh.place.index}",
            keyframe_every=config.publish.keyframe_every,
            trust=trust,
        )

    @property
    def writes(self) -> bool:
        return self._mesh.replica == 0

    def train(self, step: int, batch: RolloutBatch, signs: SignMaps, steering: Steering) -> StepStats:
        self.trainer.use_bases(signs.bases)
        return self.trainer.step(step, batch, signs.signs, steering)

    def write_part(self, version: int) -> Part | None:
        """This process's blobs of a version, on the board and not yet committed."""
        return self._writer.write(version, self._served()) if self.writes else None

    def digests(self) -> dict[str, str]:
        """Digests of the served tensors that this process writes."""
        return tensor_digests(self._served()) if self.writes else {}

    def adopt(self, version: int) -> None:
        """What is here is what was published as `version`: the next delta is against it."""
        if self.writes:
            self._writer.resume(version, self._served())

    def write_shard(self, step: int) -> Shard:
        if not self.writes:
            return Shard({}, 0)
        trainer, place = self.trainer, self._mesh.place
        held = trainer.decoder, trainer.optimizer, trainer.codec
        return write_shard(self._store, self._ledger.run_id, step, *held, place, self._masters)

    def restore(self, step: int) -> None:
        trainer, place = self.trainer, self._mesh.place
        restore(self._store, self._ledger, step, trainer.decoder, trainer.optimizer, trainer.codec, place)

    def _served(self) -> State:
        parameters = dict(self.trainer.decoder.named_parameters())
        masters: dict[str, torch.Tensor] = {name: parameters[name].detach() for name in self._names}
        return served_view(masters, self._config.publish.dtype)
