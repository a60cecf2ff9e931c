"""Arrays that each thread keeps and reuses, because touching fresh memory costs more than the loops that fill it."""

from __future__ import annotations

import threading

import numpy as np

_kept = threading.local()


def scratch(use: str, size: int, dtype: np.dtype | type) -> np.ndarray:
    """An array [size] with arbitrary content, valid until this thread asks for the same `use` again.

    Memory is kept by the thread, at most the largest size asked for per use.
    """
    wanted = size * np.dtype(dtype).itemsize
    held: np.ndarray | None = getattr(_kept, use, None)
    if held is None or held.size < wanted:
        held = np.empty(wanted, np.uint8)
        setattr(_kept, use, held)
    return held[:wanted].view(dtype)
