"""`dense`: everything crosses."""

from __future__ import annotations

from torch import Tensor

from sprawl.train.codecs.base import BoundaryCodec, TokenIds


class DenseCodec(BoundaryCodec):
    """Bit-identical to having no boundary."""

    name = "dense"

    def keep(self, hidden: int) -> int:
        return hidden

    def send(self, x: Tensor, layer: int, step: int, tokens: TokenIds) -> Tensor:
        return x

    def receive(self, payload: Tensor, hidden: int, layer: int, step: int, tokens: TokenIds) -> Tensor:
        return payload
