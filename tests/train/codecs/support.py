"""Tokens, codecs and statistics for the codecs' tests. Bounds are stated as standard errors; every test has its seed
fixed and counts its comparisons (Bonferroni), so that a correct codec fails none and a wrong one is noticed."""

from __future__ import annotations

import torch

from sprawl.train.codecs import BoundaryCodec, PrfCodec, QuantizedPrfCodec, SubspaceCodec, TokenIds

SIGMAS = 5.5
"""Two-sided 4e-8: times the some thousand comparisons of the largest test still below 1e-3, and seeds are fixed."""

MAKERS = {
    "prf": lambda ratio, seed: PrfCodec(seed=seed, ratio=ratio),
    "quantized-3": lambda ratio, seed: QuantizedPrfCodec(seed, ratio, 3),
    "quantized-4": lambda ratio, seed: QuantizedPrfCodec(seed, ratio, 4),
    "quantized-8": lambda ratio, seed: QuantizedPrfCodec(seed, ratio, 8),
    "subspace": lambda ratio, seed: SubspaceCodec(seed, ratio),
}
UNBIASED = [name for name in MAKERS if name != "subspace"]


def make(name: str, ratio: float = 0.25, seed: int = 3) -> BoundaryCodec:
    return MAKERS[name](ratio, seed)


def token_ids(count: int, width: int = 16) -> TokenIds:
    index = torch.arange(count)
    return TokenIds(sample=index // width, position=index % width, index=index)


def through(codec: BoundaryCodec, x: torch.Tensor, step: int, layer: int = 0) -> torch.Tensor:
    """[n, H] -> what arrives."""
    tokens = token_ids(x.shape[0])
    return codec.receive(codec.send(x, layer, step, tokens), x.shape[1], layer, step, tokens)


def inclusion(channels: torch.Tensor, hidden: int) -> torch.Tensor:
    """Kept channels [n, k] -> 0/1 [n, hidden] fp64."""
    return torch.zeros(channels.shape[0], hidden, dtype=torch.float64).scatter(1, channels, 1.0)


def largest_pair_deviation(kept: torch.Tensor) -> float:
    """0/1 [n, H] with k ones a row: the largest |z| over all pairs of channels of how often both were kept."""
    count, hidden = kept.shape
    keep = int(kept[0].sum())
    p = keep * (keep - 1) / (hidden * (hidden - 1))
    together = (kept.T @ kept)[torch.triu_indices(hidden, hidden, 1).unbind()]
    return float(((together - count * p) / (count * p * (1 - p)) ** 0.5).abs().max())


def largest_channel_dependence(first: torch.Tensor, second: torch.Tensor) -> float:
    """Two 0/1 [n, H]: the largest |z| over channels of how often both kept it, if they were independent."""
    p = float(first[0].sum()) / first.shape[1]
    count, both = first.shape[0], (first * second).sum(0)
    return float(((both - count * p * p) / (count * p * p * (1 - p * p)) ** 0.5).abs().max())
