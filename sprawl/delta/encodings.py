"""What the deltas of other systems would weigh, piece by piece, from the published descriptions of their formats.

Sizes only, of the payload without names or manifests, and each in its favour: `overwrite` counts positions of elements
where slime counts those of bytes, and `coo` uses the narrowest gap that fits. All are compressed with zstd level 1.
"""

from __future__ import annotations

import numpy as np
import zstandard

NAMES = {
    "xor": "XOR + zstd-1 (slime, miles, SkyRL)",
    "overwrite": "overwrite, u32 positions + zstd-1 (slime)",
    "coo": "COO gaps + zstd-1 (grail)",
}


def foreign_sizes(old: np.ndarray, new: np.ndarray) -> dict[str, int]:
    """Bytes of each encoding in `NAMES` for unsigned integers [n] before and after; 0 where nothing changed."""
    where = np.flatnonzero(old != new)
    if not where.size:
        return dict.fromkeys(NAMES, 0)
    values = new[where].tobytes()
    gaps = np.diff(where, prepend=0)
    narrow = np.min_scalar_type(int(gaps.max()))
    return {
        "xor": _zstd((old ^ new).tobytes()),
        "overwrite": _zstd(where.astype(np.uint32).tobytes()) + _zstd(values),
        "coo": _zstd(gaps.astype(narrow).tobytes()) + _zstd(values),
    }


def _zstd(data: bytes) -> int:
    return len(zstandard.ZstdCompressor(level=1).compress(data))
