"""`prf`: a fresh keyed mask a token (status report, section 1.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sprawl.train import prf
from sprawl.train.codecs.base import BoundaryCodec, TokenIds


def kept_numbers(ratio: float, hidden: int) -> int:
    """k of H: at least one, 77 of 1536 at 5 %."""
    return max(1, round(ratio * hidden))


def kept_channels(seed: int, keep: int, hidden: int, layer: int, step: int, tokens: TokenIds) -> Tensor:
    """Kept channels [n, keep] int64, ascending; cached, because every pass of an iteration uses the same mask."""
    known = tokens.cache.get((layer, step))
    if known is None:
        known = prf.channels(prf.derive_key(seed, layer, step), tokens.sample, tokens.position, hidden, keep)
        tokens.cache[layer, step] = known
    return known


@dataclass(frozen=True)
class PrfCodec(BoundaryCodec):
    """Exactly k = round(ratio * H) channels a token under a fresh keyed mask, scaled by H/k on the receiver.

    Unbiased: every channel is kept with probability k/H. The adjoint falls out of autograd: gather and scatter are
    each other's transpose, so the backward payload is the gradient of the same coordinates, already carrying the
    factor H/k.
    """

    seed: int
    ratio: float
    name: str = "prf"

    def keep(self, hidden: int) -> int:
        return kept_numbers(self.ratio, hidden)

    def channels(self, hidden: int, layer: int, step: int, tokens: TokenIds) -> Tensor:
        """Kept channels [n, k]."""
        return kept_channels(self.seed, self.keep(hidden), hidden, layer, step, tokens)

    def send(self, x: Tensor, layer: int, step: int, tokens: TokenIds) -> Tensor:
        return x.gather(1, self.channels(x.shape[1], layer, step, tokens))

    def receive(self, payload: Tensor, hidden: int, layer: int, step: int, tokens: TokenIds) -> Tensor:
        kept = self.channels(hidden, layer, step, tokens)
        scaled = payload * (hidden / kept.shape[1])
        empty = torch.zeros(payload.shape[0], hidden, dtype=payload.dtype, device=payload.device)
        return empty.scatter(1, kept, scaled)
