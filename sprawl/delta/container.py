"""The delta container: a self-checking safetensors file of two byte tensors.

    u64 size of the JSON | JSON: tensor table and `__metadata__` | tensor `header`: zstd(JSON) | tensor `payload`

`__metadata__` names the format, its version and the blake3 of the whole file, taken with the 64 digits of the digest
itself as zeros. A truncated or flipped container is refused before anything in it is interpreted.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import zstandard
from blake3 import blake3

from sprawl.errors import IntegrityError

FORMAT = 2
NAME = "sprawl-delta"
_FIRST_MAGIC = b"SPRWLDLT"  # format 1 was not safetensors
_BLANK = "0" * 64
_MAX_TABLE = 1 << 16
_MAX_HEADER = 1 << 28


def _table(header: int, payload: int) -> bytes:
    """Size and JSON of a safetensors file, digest blank; padded so that the tensors start at a multiple of 8."""
    table = {
        "__metadata__": {"blake3": _BLANK, "format": NAME, "version": str(FORMAT)},
        "header": {"data_offsets": [0, header], "dtype": "U8", "shape": [header]},
        "payload": {"data_offsets": [header, header + payload], "dtype": "U8", "shape": [payload]},
    }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def pack(header: dict[str, Any], parts: Sequence[bytes]) -> bytes:
    """Deterministic bytes of a container; the payload is `parts`, one after the other."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    packed = zstandard.ZstdCompressor(level=9).compress(text)
    table = _table(len(packed), sum(len(part) for part in parts))
    hasher = blake3(table)
    for part in (packed, *parts):
        hasher.update(part)
    return b"".join([table.replace(_BLANK.encode(), hasher.hexdigest().encode(), 1), packed, *parts])


def unpack(blob: bytes, name: str) -> tuple[dict[str, Any], memoryview]:
    """Header and payload. Raises IntegrityError naming the blob (`name`) when it is not an intact container."""
    if blob[: len(_FIRST_MAGIC)] == _FIRST_MAGIC:
        raise _other_format(name, 1)
    table, start = _read_table(blob, name)
    meta = table["__metadata__"]
    prefix = blob[:start].replace(str(meta["blake3"]).encode(), _BLANK.encode(), 1)
    body = memoryview(blob)[start:]
    if blake3(prefix).update(body).hexdigest() != meta["blake3"]:
        raise IntegrityError(f"{name} is damaged: its bytes do not have the digest it carries", "fetch it again")
    if meta["version"] != str(FORMAT):
        raise _other_format(name, meta["version"])
    middle, end = table["payload"]["data_offsets"]
    try:
        text = zstandard.ZstdDecompressor().decompress(body[:middle], max_output_size=_MAX_HEADER)
        header = json.loads(text)
    except (zstandard.ZstdError, ValueError) as error:
        raise IntegrityError(f"{name} has an unreadable header: {error}") from None
    return header, body[middle:end]


def _read_table(blob: bytes, name: str) -> tuple[dict[str, Any], int]:
    """The table, and where the tensors start."""
    (size,) = struct.unpack("<Q", blob[:8]) if len(blob) >= 8 else (0,)
    try:
        table: Any = json.loads(bytes(blob[8 : 8 + size])) if 0 < size <= _MAX_TABLE else None
        intact = table["__metadata__"]["format"] == NAME and len(table["__metadata__"]["blake3"]) == 64
        int(table["__metadata__"]["version"])
        intact = intact and 0 <= table["payload"]["data_offsets"][0] <= table["payload"]["data_offsets"][1]
    except (ValueError, TypeError, KeyError, IndexError):
        intact = False
    if not intact:
        raise IntegrityError(f"{name} is not a Sprawl delta, or its first bytes are damaged", "fetch it again")
    return table, 8 + size


def _other_format(name: str, version: int | str) -> IntegrityError:
    return IntegrityError(
        f"{name} has delta format {version}, this release knows {FORMAT}",
        "upgrade the reader" if int(version) > FORMAT else "read it with the release that wrote it",
    )
