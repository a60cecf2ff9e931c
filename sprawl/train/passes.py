"""How microbatches go through the stages: the port that the trainer's step is written against, and its adapter for
stages that share a process. `sprawl.train.runtime` has the one for a process a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from sprawl.train.codecs import BoundaryCodec, WireCounter
from sprawl.train.pipeline import Packed, StagedPolicy, TokenStats

Which = Literal["policy", "reference"]


@dataclass(frozen=True)
class Crossing:
    """What the passes of one update have in common."""

    codec: BoundaryCodec
    step: int
    temperature: float
    wire: WireCounter


class Passes(Protocol):
    """`take` and `loss` are called where the last stage is, in the order of the microbatches, and nowhere else."""

    def read(
        self, which: Which, packs: Sequence[Packed], crossing: Crossing, take: Callable[[int, Tensor], None]
    ) -> None:
        """Forward only, without gradients: take(number, log-probs [m, V] fp32)."""

    def learn(self, packs: Sequence[Packed], crossing: Crossing, loss: Callable[[int, TokenStats], Tensor]) -> None:
        """Forward and backward of the policy: gradients of the sum of loss(number, stats) are added to its own."""


class Fabric(Protocol):
    """What the processes of a trainer settle among themselves; all of them make the same calls in the same order."""

    replica: int
    replicas: int

    def counts(self, name: str) -> bool:
        """Whether this process speaks for a parameter in sums over the model: exactly one does."""

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Complete the gradients: over replicas, and over the two ends of a tied embedding."""

    def sum_codec(self, codec: BoundaryCodec) -> None:
        """What the replicas' codecs have gathered for their next step becomes what all of them gathered."""

    def add(self, values: Tensor) -> Tensor:
        """Sum of a vector over all processes, fp64, the same bits everywhere."""

    def largest(self, value: float) -> float:
        """Largest of a number over all processes."""


class Alone:
    """The fabric of a trainer that is one process."""

    replica = 0
    replicas = 1

    def counts(self, name: str) -> bool:
        return True

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        pass

    def sum_codec(self, codec: BoundaryCodec) -> None:
        pass

    def add(self, values: Tensor) -> Tensor:
        return values

    def largest(self, value: float) -> float:
        return value


class LocalPasses:
    """All stages in this process, one after another; see `pipeline`."""

    def __init__(self, policy: StagedPolicy, reference: StagedPolicy) -> None:
        self._models = {"policy": policy, "reference": reference}

    @torch.no_grad()
    def read(
        self, which: Which, packs: Sequence[Packed], crossing: Crossing, take: Callable[[int, Tensor], None]
    ) -> None:
        for number, packed in enumerate(packs):
            take(
                number,
                self._models[which].distributions(
                    packed,
                    codec=crossing.codec,
                    step=crossing.step,
                    temperature=crossing.temperature,
                    wire=crossing.wire,
                ),
            )

    def learn(self, packs: Sequence[Packed], crossing: Crossing, loss: Callable[[int, TokenStats], Tensor]) -> None:
        for number, packed in enumerate(packs):
            stats = self._models["policy"].token_stats(
                packed, codec=crossing.codec, step=crossing.step, temperature=crossing.temperature, wire=crossing.wire
            )
            loss(number, stats).backward()
