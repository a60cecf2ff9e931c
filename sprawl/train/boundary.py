"""Boundary codecs: what crosses from one pipeline stage to the next, and how it becomes a hidden state again.

A codec has two halves, one on each side of the wire: `send` makes the payload, `receive` makes the hidden state.
Only the payload may cross, forward and backward; the gradient that returns is the gradient of the payload.
Layer index 0 is the boundary behind the first stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sprawl.config import BoundaryConfig
from sprawl.train import prf


@dataclass
class WireCounter:
    """Bytes of the payload tensors that crossed, both directions, and what dense tensors of the same tokens cost."""

    sent: int = 0
    dense: int = 0

    def count(self, payload: Tensor, hidden: int) -> None:
        self.sent += payload.numel() * payload.element_size()
        self.dense += payload.shape[0] * hidden * payload.element_size()


@dataclass(frozen=True)
class TokenIds:
    """Which tokens a payload carries: the keys of the mask.

    sample, position: [n] int64, global sample number within the step and position within the sequence.
    index: [n] int64, row of the token in the flattened [B*T, H] hidden state.
    """

    sample: Tensor
    position: Tensor
    index: Tensor
    cache: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class BoundaryCodec(Protocol):
    @property
    def name(self) -> str:
        """As in the config: dense, prf ..."""

    def keep(self, hidden: int) -> int:
        """Numbers a token sends out of `hidden`."""

    def send(self, x: Tensor, layer: int, step: int, tokens: TokenIds) -> Tensor:
        """[n, H] hidden states of the tokens -> payload [n, k]."""

    def receive(self, payload: Tensor, hidden: int, layer: int, step: int, tokens: TokenIds) -> Tensor:
        """Payload [n, k] -> estimate of the hidden states [n, H]."""


@dataclass(frozen=True)
class DenseCodec:
    """Everything crosses; bit-identical to having no boundary."""

    name: str = "dense"

    def keep(self, hidden: int) -> int:
        return hidden

    def send(self, x: Tensor, layer: int, step: int, tokens: TokenIds) -> Tensor:
        return x

    def receive(self, payload: Tensor, hidden: int, layer: int, step: int, tokens: TokenIds) -> Tensor:
        return payload


@dataclass(frozen=True)
class PrfCodec:
    """Exactly k = round(ratio * H) channels a token under a fresh keyed mask, scaled by H/k on the receiver.

    Unbiased: every channel is kept with probability k/H (status report, section 1.2). The adjoint falls out of
    autograd: gather and scatter are each other's transpose, so the backward payload is the gradient of the same
    coordinates, already carrying the factor H/k.
    """

    seed: int
    ratio: float
    name: str = "prf"

    def keep(self, hidden: int) -> int:
        return max(1, round(self.ratio * hidden))

    def channels(self, hidden: int, layer: int, step: int, tokens: TokenIds) -> Tensor:
        """Kept channels [n, k]; cached, because every pass of an iteration uses the same mask."""
        known = tokens.cache.get((layer, step))
        if known is None:
            key = prf.derive_key(self.seed, layer, step)
            known = prf.channels(key, tokens.sample, tokens.position, hidden, self.keep(hidden))
            tokens.cache[layer, step] = known
        return known

    def send(self, x: Tensor, layer: int, step: int, tokens: TokenIds) -> Tensor:
        return x.gather(1, self.channels(x.shape[1], layer, step, tokens))

    def receive(self, payload: Tensor, hidden: int, layer: int, step: int, tokens: TokenIds) -> Tensor:
        kept = self.channels(hidden, layer, step, tokens)
        scaled = payload * (hidden / kept.shape[1])
        return torch.zeros(payload.shape[0], hidden, dtype=payload.dtype).scatter(1, kept, scaled)


def make_codec(config: BoundaryConfig, seed: int) -> BoundaryCodec:
    if config.codec == "dense":
        return DenseCodec()
    return PrfCodec(seed=seed, ratio=config.ratio)


def cross(x: Tensor, codec: BoundaryCodec, layer: int, step: int, tokens: TokenIds, wire: WireCounter | None) -> Tensor:
    """Carry [B, T, H] over a boundary inside one process: padding does not cross and arrives as zeros.

    The payload tensor is the only connection between the two sides, in both directions; `wire` counts its bytes.
    """
    hidden = x.shape[-1]
    flat = x.reshape(-1, hidden)
    payload = codec.send(flat.index_select(0, tokens.index), layer, step, tokens)
    if wire is not None:
        wire.count(payload, hidden)
        if payload.requires_grad:
            payload.register_hook(lambda gradient: wire.count(gradient, hidden))
    arrived = codec.receive(payload, hidden, layer, step, tokens)
    return torch.zeros_like(flat).index_copy(0, tokens.index, arrived).view(x.shape)
