"""Boundary codecs, one a module, behind one interface (`base.BoundaryCodec`)."""

from sprawl.config import BoundaryConfig
from sprawl.train.codecs.base import BoundaryCodec, TokenIds, WireCounter, arrive, cross, leave
from sprawl.train.codecs.dense import DenseCodec
from sprawl.train.codecs.masked import PrfCodec
from sprawl.train.codecs.quantized import QuantizedPrfCodec
from sprawl.train.codecs.subspace import BasisObserver, SubspaceCodec

__all__ = [
    "BasisObserver",
    "BoundaryCodec",
    "DenseCodec",
    "PrfCodec",
    "QuantizedPrfCodec",
    "SubspaceCodec",
    "TokenIds",
    "WireCounter",
    "arrive",
    "cross",
    "leave",
    "make_codec",
]


def make_codec(config: BoundaryConfig, seed: int) -> BoundaryCodec:
    """The codec that the run's config describes."""
    if config.codec == "dense":
        return DenseCodec()
    if config.codec == "subspace":
        return SubspaceCodec(seed, config.ratio)
    if config.codec == "quantized-prf":
        return QuantizedPrfCodec(seed, config.ratio, config.bits)
    return PrfCodec(seed=seed, ratio=config.ratio)
