"""Boundary codecs by their short name; the package `sprawl.train.codecs` holds them."""

from sprawl.train.codecs import (
    BoundaryCodec,
    DenseCodec,
    PrfCodec,
    QuantizedPrfCodec,
    SubspaceCodec,
    TokenIds,
    WireCounter,
    cross,
    make_codec,
)

__all__ = [
    "BoundaryCodec",
    "DenseCodec",
    "PrfCodec",
    "QuantizedPrfCodec",
    "SubspaceCodec",
    "TokenIds",
    "WireCounter",
    "cross",
    "make_codec",
]
