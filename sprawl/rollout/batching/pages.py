"""The memory of the embedded engine: keys and values in pages of a pool whose size is fixed at the start."""

from __future__ import annotations

import numpy as np

from sprawl.policy import Architecture

PAGE = 16  # positions of one sequence


def page_bytes(arch: Architecture) -> int:
    """Bytes of one page: fp32 keys and values of `PAGE` positions in all layers."""
    return 2 * arch.layers * arch.kv_heads * arch.head_dim * PAGE * 4


def pages_for(positions: int) -> int:
    """Pages that hold so many positions."""
    return -(-positions // PAGE)


class PagePool:
    """Pages are handed out and taken back whole; what they held before is never read.

    keys fp32 [pages, layers, kv_heads, head_dim, PAGE] (positions last, so that the scores of a page are computed side
    by side), values fp32 [pages, layers, kv_heads, PAGE, head_dim]. The system gives the memory when a page is first
    written, and the pages freed last are used first: what is resident is what was ever needed at once, at most
    `pages * page_bytes(arch)`.
    """

    def __init__(self, arch: Architecture, pages: int) -> None:
        self.pages = pages
        self.keys = np.zeros((pages, arch.layers, arch.kv_heads, arch.head_dim, PAGE), np.float32)
        self.values = np.zeros((pages, arch.layers, arch.kv_heads, PAGE, arch.head_dim), np.float32)
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages of undefined content. Raises IndexError when there are fewer: ask `free` before."""
        if count > len(self._free):
            raise IndexError(f"{count} pages wanted, {len(self._free)} free")
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        """Take pages back."""
        self._free.extend(reversed(pages))

    def copy(self, source: int, target: int) -> None:
        """Copy the content of a page, all layers."""
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]
