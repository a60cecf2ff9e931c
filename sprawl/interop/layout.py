"""The disk layout in which slime, miles and stitch hand over weights: names, index, checksums, encodings.

    <root>/latest                                   `<run_id>/weight_v000007` (or `weight_v000007`), plain text
    <root>/<run_id>/weight_v000007/                 also seen: <root>/updates/weight_v000007/, <root>/weight_v000007/
        model.safetensors.index.json                metadata (below) and weight_map: tensor -> shard
        *.safetensors                               the shards

A version whose index has `metadata.delta_encoding` is a delta: its shards hold one U8 blob a changed tensor, zstd over
the encoding below, and their safetensors metadata maps the tensor's name to the checksum of its *new* bytes. Without
it the version is full: an ordinary Hugging Face checkpoint.

    xor         old bytes ^ new bytes, as long as the tensor
    overwrite   u4 count | count x u4 byte positions | count x u1 new bytes (little-endian)

Positions are 32-bit, so a tensor beyond 4 GiB cannot be overwritten. Source: the projects' published format (read
2026-11-30); fixtures in our tests are made by this code, not taken from theirs.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import zstandard
from blake3 import blake3

from sprawl.errors import IntegrityError, SprawlError

POINTER = "latest"
INDEX = "model.safetensors.index.json"
Encoding = Literal["xor", "overwrite"]
ENCODINGS: tuple[Encoding, ...] = ("xor", "overwrite")
CHECKSUMS = ("xxh3-128", "blake3", "adler32")
_PREFIX = "weight_v"
_LEVEL = 1
_POSITIONS = 1 << 32  # bytes that a u4 position can address


def folder_name(version: int) -> str:
    """`weight_v000007`."""
    return f"{_PREFIX}{version:06d}"


@dataclass(frozen=True)
class Pointer:
    """Content of `latest`: the newest version, and of which run."""

    run_id: str | None
    version: int

    def __str__(self) -> str:
        name = folder_name(self.version)
        return f"{self.run_id}/{name}" if self.run_id else name

    @classmethod
    def parse(cls, text: str, name: str) -> Pointer:
        """Raises IntegrityError naming the pointer: an unreadable one must never mean version 0."""
        run_id, _, tail = text.strip().rpartition("/")
        digits = tail.removeprefix(_PREFIX)
        if not digits.isdecimal():
            raise IntegrityError(f"{name} holds {text.strip()[:80]!r}, which names no version")
        return cls(run_id or None, int(digits))


@dataclass(frozen=True)
class Index:
    """model.safetensors.index.json of a version; `encoding` is None on full ones."""

    version: int
    base_version: int | None
    encoding: Encoding | None
    checksum: str
    weight_map: dict[str, str]

    def to_bytes(self, total_size: int) -> bytes:
        """As the other projects write it: version numbers are zero-padded strings, compared as such."""
        metadata: dict[str, Any] = {"version": f"{self.version:06d}", "total_size": total_size}
        if self.encoding is not None:
            metadata |= {
                "base_version": f"{self.base_version:06d}",
                "delta_encoding": self.encoding,
                "compression_format": "zstd",
                "checksum_format": self.checksum,
            }
        return json.dumps({"metadata": metadata, "weight_map": self.weight_map}, indent=2).encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Index:
        """Raises IntegrityError naming the index (`name`) when it is damaged or of a kind this release cannot read."""
        try:
            parsed = json.loads(data)
            metadata, weight_map = parsed["metadata"], parsed["weight_map"]
            version = int(metadata["version"])
            encoding = metadata.get("delta_encoding") or None
            base = int(metadata["base_version"]) if encoding is not None else None
            if not all(isinstance(file, str) and "/" not in file for file in weight_map.values()):
                raise ValueError("weight_map names files outside its folder")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{name} is not the index of a version: {error}") from None
        compression = metadata.get("compression_format", "zstd")
        checksum = metadata.get("checksum_format", "adler32")
        if encoding is not None:
            for what, found, known in (
                ("delta_encoding", encoding, ENCODINGS),
                ("compression_format", compression, ("zstd",)),
                ("checksum_format", checksum, CHECKSUMS),
            ):
                if found not in known:
                    raise IntegrityError(f"{name} has {what} {found!r}, this release reads {', '.join(known)}")
        return cls(version, base, encoding, checksum, weight_map)


def checksum(kind: str, data: np.ndarray) -> str:
    """Hex checksum of uint8 [n]. Raises SprawlError when the package for `kind` is missing."""
    match kind:
        case "blake3":
            return blake3(data.data).hexdigest()
        case "adler32":
            return f"{zlib.adler32(data.data):08x}"
        case "xxh3-128":
            try:
                import xxhash
            except ImportError:
                raise SprawlError("xxh3-128 needs the package xxhash", "pip install 'sprawl-rl[interop]'") from None
            return xxhash.xxh3_128(data.data).hexdigest()
    raise SprawlError(f"unknown checksum {kind!r}", f"use one of {', '.join(CHECKSUMS)}")


def encode(encoding: Encoding, old: np.ndarray, new: np.ndarray, name: str) -> bytes:
    """The blob that turns `old` into `new`, uint8 [n] both. Raises SprawlError naming the tensor when it cannot be."""
    if encoding == "xor":
        return zstandard.ZstdCompressor(level=_LEVEL).compress((old ^ new).data)
    if new.size > _POSITIONS:
        raise SprawlError(
            f"tensor {name!r} has {new.size} bytes, more than the 32-bit positions of overwrite reach",
            "use the encoding xor",
        )
    positions = np.flatnonzero(old != new).astype("<u4")
    count = np.array([positions.size], "<u4")
    body = np.concatenate([count.view(np.uint8), positions.view(np.uint8), new[positions]])
    return zstandard.ZstdCompressor(level=_LEVEL).compress(body.data)


def decode(encoding: Encoding, old: np.ndarray, blob: bytes, name: str) -> np.ndarray:
    """The new bytes, uint8 [n]; `old` uint8 [n] is not touched. Raises IntegrityError naming the tensor (`name`)."""
    limit = old.size if encoding == "xor" else 4 + 5 * old.size
    body = np.frombuffer(_decompress(blob, limit, name), np.uint8)
    if encoding == "xor":
        if body.size != old.size:
            raise IntegrityError(f"{name}: the XOR has {body.size} bytes, the tensor has {old.size}")
        return old ^ body
    if body.size < 4:
        raise IntegrityError(f"{name}: the overwrite has no count")
    count = int(body[:4].view("<u4")[0])
    if body.size != 4 + 5 * count:
        raise IntegrityError(f"{name}: the overwrite announces {count} positions and has {body.size} bytes")
    positions = body[4 : 4 + 4 * count].view("<u4")
    if count and int(positions.max()) >= old.size:
        raise IntegrityError(f"{name}: the overwrite reaches byte {positions.max()}, the tensor has {old.size}")
    new = old.copy()
    new[positions] = body[4 + 4 * count :]
    return new


def _decompress(blob: bytes, limit: int, name: str) -> bytes:
    # Frames of streaming compressors do not say how long their content is, so the limit is ours.
    try:
        data = zstandard.ZstdDecompressor().stream_reader(blob).read(limit + 1)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{name} does not decompress: {error}") from None
    if len(data) > limit:
        raise IntegrityError(f"{name} decompresses to more than the {limit} bytes that it can have")
    return data
