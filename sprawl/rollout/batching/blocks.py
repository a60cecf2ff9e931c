"""Blocks of rows: tokens of any sequences at any positions, pushed through the decoder together, each computed as if it
were alone.

Attention works row by row (`kernels`). What is left are matrix products and element-wise work on [rows, channels]. For
those a library may choose another order of additions for another number of rows (a single row usually does), so rows
are padded to one of a few sizes, and only sizes at which every row comes out with the same bits, at every place in the
block, are used. That is measured on the machine, not assumed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from sprawl.policy import Architecture, Decoder
from sprawl.policy.decoder import Layer
from sprawl.rollout.batching.kernels import attend
from sprawl.rollout.batching.pages import PAGE, PagePool, pages_for
from sprawl.rollout.sampling import sample

BASE = 8
SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128)


@dataclass(eq=False)
class Track:
    """One token sequence and its pages: position i is in page `pages[i // PAGE]`. Keys and values of the first `done`
    positions are computed. `served`: when it was last in a block."""

    tokens: list[int]
    pages: NDArray[np.int32]
    done: int = 0
    served: int = 0


class Blocks:
    """Runs blocks of at most `limit` rows of one decoder, whose weights are of `dtype`; sequences of at most
    `max_length` positions. Not for several threads."""

    def __init__(self, decoder: Decoder, pool: PagePool, dtype: torch.dtype, max_length: int) -> None:
        arch = decoder.arch
        self._decoder = decoder
        self._pool = pool
        self.sizes = row_sizes(arch, dtype, torch.get_num_threads())
        self.limit = self.sizes[-1]
        rotary = decoder.rotary(0, max_length, torch.float32)
        self._cos, self._sin = rotary.cos.numpy(), rotary.sin.numpy()
        self._scores = np.empty(pages_for(max_length) * PAGE, np.float32)
        self._mixed = np.zeros((self.limit, arch.heads, arch.head_dim), np.float32)
        self._compile()

    def hidden(self, pieces: Sequence[tuple[Track, int]]) -> Tensor:
        """Compute the next `count` positions of every (track, count), at most `limit` together, and advance `done`.
        Returns the last layer's output of the last position of each: [pieces, H], compute dtype."""
        counts = np.array([count for _, count in pieces])
        rows = int(counts.sum())
        size = self._size(rows)
        tokens = torch.zeros(size, dtype=torch.int64)
        tokens[:rows] = torch.tensor(
            [token for track, n in pieces for token in track.tokens[track.done : track.done + n]]
        )
        positions = np.concatenate([np.arange(track.done, track.done + n) for track, n in pieces])
        tables = [track.pages[: pages_for(track.done + n)] for track, n in pieces]
        starts = np.repeat(np.cumsum([0, *map(len, tables[:-1])]), counts)
        where = (positions, np.concatenate(tables), starts, rows)
        hidden = self._decoder.run_rows(tokens, functools.partial(self._attend, where))
        for track, count in pieces:
            track.done += count
        return hidden[torch.from_numpy(np.cumsum(counts) - 1)]

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] of any n -> fp32 logits [n, V]."""
        parts = []
        for part in hidden.split(self.limit):
            padded = part.new_zeros(self._size(len(part)), part.shape[1])
            padded[: len(part)] = part
            parts.append(self._decoder.head(padded)[: len(part)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _compile(self) -> None:
        """Have the loops compiled now, which takes seconds, and not in the first request."""
        arch, none = self._decoder.arch, np.zeros(0, np.int64)
        query, key = (torch.zeros(1, heads, arch.head_dim) for heads in (arch.heads, arch.kv_heads))
        self._attend((none, none.astype(np.int32), none, 0), 0, query, key, key)
        sample(torch.zeros(1, 2), 1.0, np.zeros(1))

    def _size(self, rows: int) -> int:
        return next(size for size in self.sizes if size >= rows)

    def _attend(
        self,
        where: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64], int],
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """See `sprawl.policy.decoder.RowAttention`."""
        positions, table, starts, rows = where
        mixed = self._mixed[: len(query)]
        q, k, v = (tensor.float().contiguous().numpy() for tensor in (query, key, value))
        keys, values = self._pool.keys, self._pool.values
        attend(q, k, v, self._cos, self._sin, positions, table, starts, rows, layer, keys, values, self._scores, mixed)
        return torch.from_numpy(mixed).to(query.dtype)


@functools.cache
def row_sizes(arch: Architecture, dtype: torch.dtype, threads: int) -> tuple[int, ...]:
    """The sizes of `SIZES` at which the bits of a row depend on nothing but the row, ascending; `(1,)` if none is.

    Checked on one layer with random rows and weights, whose shapes all layers share, and on each of its matrix products
    and the head's with numbers that show the order of additions. `threads` is part of the question: it is how many
    torch works with now.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        block = Layer(arch).to(dtype)
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

        def first_position(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).contiguous()

        rows = torch.randn(SIZES[-1], arch.hidden, generator=generator).to(dtype)
        good = set(invariant_sizes(lambda x: block.run_rows(x, 0, first_position), rows))
        linear = [module for module in block.modules() if isinstance(module, nn.Linear)]
        products = {(*module.weight.shape, module.bias is not None) for module in linear}
        for outputs, inputs, biased in sorted({*products, (arch.vocab, arch.hidden, False)}):
            x, weight = cancelling(outputs, inputs, generator)
            bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
            product = functools.partial(F.linear, weight=weight.to(dtype), bias=bias)
            good &= set(invariant_sizes(product, x.to(dtype)))
        return tuple(sorted(good)) or (1,)


def cancelling(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows [SIZES[-1], inputs] and a weight [outputs, inputs], fp32, half of whose products are large and cancel in
    pairs: what they leave of a sum is the rounding of its partial sums, so another order gives another result.

    With ordinary numbers another order gives another bf16 result only where it crosses a rounding boundary, once in
    thousands: too seldom to be seen here, often enough to be met in a run.
    """
    rows = torch.randn(SIZES[-1], inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    first, second = torch.randperm(inputs, generator=generator)[: inputs // 4 * 2].view(2, -1)
    # 2**20 in a product of two factors that fp16 can hold: fp32 sums of them round at 2**-4 of the other products.
    rows[:, first] *= 2.0**10
    weight[:, first] *= 2.0**10
    rows[:, second], weight[:, second] = rows[:, first], -weight[:, first]
    return rows, weight


def invariant_sizes(compute: Callable[[Tensor], Tensor], rows: Tensor) -> tuple[int, ...]:
    """Those of `SIZES` at which `compute`, [n, H] -> [n, V], gives every row the bits that it has in a block of `BASE`
    rows, in its own place and in others. rows: [SIZES[-1], H]."""
    expected = torch.cat([compute(part) for part in rows.split(BASE)])

    def agrees(size: int) -> bool:
        moved = (compute(rows[:size].roll(by, 0)).roll(-by, 0) for by in (0, size // 2 + 1))
        return all(torch.equal(result, expected[:size]) for result in moved)

    found = tuple(size for size in SIZES if agrees(size))
    return found if BASE in found else ()
