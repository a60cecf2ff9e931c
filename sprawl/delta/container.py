"""The delta container: one self-checking blob.

    magic 8 bytes | blake3 of everything after it, 32 bytes | u32 size of header | zstd(JSON header) | payload

A truncated or flipped container is refused before anything in it is interpreted.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import zstandard
from blake3 import blake3

from sprawl.errors import IntegrityError

FORMAT = 1
MAGIC = b"SPRWLDLT"
_PREFIX = len(MAGIC) + 32
_MAX_HEADER = 1 << 28


def pack(header: dict[str, Any], payload: bytes) -> bytes:
    """Deterministic bytes of a container."""
    text = json.dumps({"format": FORMAT, **header}, sort_keys=True, separators=(",", ":")).encode()
    packed = zstandard.ZstdCompressor(level=9).compress(text)
    body = struct.pack("<I", len(packed)) + packed + payload
    return MAGIC + blake3(body).digest() + body


def unpack(blob: bytes, name: str) -> tuple[dict[str, Any], memoryview]:
    """Header and payload. Raises IntegrityError naming the blob (`name`) when it is not an intact container."""
    if blob[: len(MAGIC)] != MAGIC:
        raise IntegrityError(f"{name} is not a Sprawl delta")
    body = memoryview(blob)[_PREFIX:]
    if len(body) < 4 or blake3(body).digest() != blob[len(MAGIC) : _PREFIX]:
        raise IntegrityError(f"{name} is damaged: its bytes do not have the digest it carries", "fetch it again")
    (size,) = struct.unpack("<I", body[:4])
    try:
        text = zstandard.ZstdDecompressor().decompress(body[4 : 4 + size], max_output_size=_MAX_HEADER)
        header = json.loads(text)
    except (zstandard.ZstdError, ValueError) as error:
        raise IntegrityError(f"{name} has an unreadable header: {error}") from None
    if header.get("format") != FORMAT:
        raise IntegrityError(
            f"{name} has delta format {header.get('format')}, this release knows {FORMAT}", "upgrade the reader"
        )
    return header, body[4 + size :]
