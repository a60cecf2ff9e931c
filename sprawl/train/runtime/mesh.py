"""Processes as a grid of replicas x stages, and what they settle by collectives. Rank = replica * stages + stage.

Nothing the size of a batch or of the weights crosses here but gradients: between replicas of a stage, and between the
two ends of a tied embedding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from sprawl.config import PolicyConfig
from sprawl.errors import ConfigError
from sprawl.policy.architecture import Architecture
from sprawl.policy.stage import TIED, StagePlace
from sprawl.train.codecs import BoundaryCodec


class Mesh:
    """This process's place in the grid; the `Fabric` of its trainer. Needs an initialised default process group."""

    def __init__(self, policy: PolicyConfig, arch: Architecture) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        if world != policy.stages * policy.replicas:
            raise ConfigError(
                f"policy.stages={policy.stages} x policy.replicas={policy.replicas} needs "
                f"{policy.stages * policy.replicas} processes, there are {world}"
            )
        self.stages, self.replicas = policy.stages, policy.replicas
        self.replica, stage = divmod(rank, policy.stages)
        self.place = StagePlace(stage, policy.stages, arch.split(policy.stages, policy.split)[stage])
        grid = init_device_mesh("cpu", (policy.replicas, policy.stages), mesh_dim_names=("replica", "stage"))
        self.pipeline = grid.get_group("stage")
        self._peers = grid.get_group("replica")
        self._ends = None
        if arch.tied and policy.stages > 1:
            # Every process takes part in the making of every group.
            for replica in range(policy.replicas):
                first = replica * policy.stages
                ends = dist.new_group([first, first + policy.stages - 1])
                if replica == self.replica and (self.place.first or self.place.last):
                    self._ends = ends

    def counts(self, name: str) -> bool:
        return self.replica == 0 and (self.place.first or name != TIED)

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            if self.replicas > 1:
                dist.all_reduce(parameter.grad, group=self._peers)
            if name == TIED and self._ends is not None:
                # Two addends: the same bits at both ends, so that the two copies stay one parameter.
                dist.all_reduce(parameter.grad, group=self._ends)

    def sum_codec(self, codec: BoundaryCodec) -> None:
        if self.replicas > 1:
            for _, tensor in sorted(codec.gathered().items()):
                dist.all_reduce(tensor, group=self._peers)

    def add(self, values: Tensor) -> Tensor:
        total = values.double().clone()
        dist.all_reduce(total)
        return total

    def largest(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)
