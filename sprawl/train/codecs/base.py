"""What every boundary codec is: two halves, one on each side of the wire, and the payload between them.

`send` makes the payload, `receive` makes the hidden state. Only the payload may cross, forward and backward; the
gradient that returns has the payload's shape and dtype. So every codec, quantised ones included, is `[tokens, k]`
numbers of the hidden state's dtype on the wire. Layer index 0 is the boundary behind the first stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sprawl.errors import IntegrityError


@dataclass
class WireCounter:
    """Bytes of the payload tensors that crossed, both directions, and what dense tensors of the same tokens cost.

    padding: bytes of `sent` that stand for no token, where payloads have a fixed size.
    """

    sent: int = 0
    dense: int = 0
    padding: int = 0

    def count(self, payload: Tensor, hidden: int) -> None:
        self.sent += payload.numel() * payload.element_size()
        self.dense += payload.shape[0] * hidden * payload.element_size()


@dataclass(frozen=True)
class TokenIds:
    """Which tokens a payload carries: the keys of the mask.

    sample, position: [n] int64, global sample number within the step and position within the sequence.
    index: [n] int64, row of the token in the flattened [B*T, H] hidden state.
    cache: masks by (layer, step), shared by all passes over these tokens.
    """

    sample: Tensor
    position: Tensor
    index: Tensor
    cache: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class BoundaryCodec:
    """A codec without state; those with some override the last three methods."""

    name: str

    def keep(self, hidden: int) -> int:
        """Numbers a token sends out of `hidden`: the payload's width."""
        raise NotImplementedError

    def describe(self, hidden: int) -> str:
        """One phrase for people."""
        return f"{self.name}: {self.keep(hidden)} of {hidden} channels"

    def send(self, x: Tensor, layer: int, step: int, tokens: TokenIds) -> Tensor:
        """[n, H] hidden states of the tokens -> payload [n, k]."""
        raise NotImplementedError

    def receive(self, payload: Tensor, hidden: int, layer: int, step: int, tokens: TokenIds) -> Tensor:
        """Payload [n, k] -> estimate of the hidden states [n, H]."""
        raise NotImplementedError

    def begin(self, step: int) -> None:
        """A step starts: what was learned during the one before comes into force. All its passes see the same state."""

    def state(self) -> dict[str, Tensor]:
        """What the next step needs to know beyond its inputs, for a checkpoint; empty when nothing."""
        return {}

    def held_by(self, name: str, stage: int) -> bool:
        """Whether a stage in a process of its own needs the state tensor `name`."""
        return True

    def gathered(self) -> dict[str, Tensor]:
        """Running sums towards the next step's state, to be added up in place over replicas of the pipeline."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `state`. Raises IntegrityError when the state is not this codec's."""
        if tensors:
            raise IntegrityError(
                f"codec {self.name} has no state, the checkpoint has {sorted(tensors)[0]!r}",
                "resume with the run's boundary.codec",
            )


def leave(x: Tensor, codec: BoundaryCodec, layer: int, step: int, tokens: TokenIds) -> Tensor:
    """The sending half of a crossing: [B, T, H] -> payload [n, k] of the real tokens; padding does not cross."""
    return codec.send(x.reshape(-1, x.shape[-1]).index_select(0, tokens.index), layer, step, tokens)


def arrive(
    payload: Tensor, shape: tuple[int, int, int], codec: BoundaryCodec, layer: int, step: int, tokens: TokenIds
) -> Tensor:
    """The receiving half: payload [n, k] -> [B, T, H] of `shape`; what did not cross arrives as zeros."""
    arrived = codec.receive(payload, shape[2], layer, step, tokens)
    empty = torch.zeros(shape[0] * shape[1], shape[2], dtype=payload.dtype, device=payload.device)
    return empty.index_copy(0, tokens.index, arrived).view(shape)


def cross(x: Tensor, codec: BoundaryCodec, layer: int, step: int, tokens: TokenIds, wire: WireCounter | None) -> Tensor:
    """Carry [B, T, H] over a boundary inside one process.

    The payload tensor is the only connection between the two sides, in both directions; `wire` counts its bytes.
    """
    rows, length, hidden = x.shape
    payload = leave(x, codec, layer, step, tokens)
    if wire is not None:
        wire.count(payload, hidden)
        if payload.requires_grad:
            payload.register_hook(lambda gradient: wire.count(gradient, hidden))
    return arrive(payload, (rows, length, hidden), codec, layer, step, tokens)
