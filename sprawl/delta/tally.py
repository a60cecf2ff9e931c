"""Push versus floor, counted: how many values of which magnitude moved how far, in a histogram of fixed size.

A served value changes when its update (the push) carries the master weight over a rounding boundary. Where the master
lies inside its rounding cell is unknown and taken as uniform, so a push p changes a value whose cell is `spacing` wide
with probability min(1, p / spacing). The cell of bf16 at theta is theta/128 wide (at a power of two; the boundary is
theta/256 away), in general theta / 2**m for m mantissa bits.

The prediction is low where a changed scale moves the codes under it, and high in the first steps of a run whose
masters were loaded from served weights: they start in the middle of their cells.

Magnitudes, spacings and steps are binned by the top bits of their fp32 form: eight bins an octave, whose lower edge
stands for the bin. Spacings and steps of plain formats are powers of two times small integers, which are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numba import njit

_SHIFT = 20  # keeps 3 mantissa bits of an fp32
BINS = 256 << (23 - _SHIFT)
_ZERO_ROW = 512  # two rows a binade (split where a decade begins inside it), one for zero
ROWS = 513


def _decade_edges() -> tuple[np.ndarray, np.ndarray]:
    """Per fp32 exponent: the decade of the binade's lower edge, and the fp32 magnitude at which the next one begins."""
    lower = np.ldexp(np.ones(256), np.arange(256) - 127)
    decade = np.floor(np.log10(lower) + 1e-12).astype(np.int64)
    with np.errstate(over="ignore"):  # the last binade ends beyond fp32
        return decade, (10.0 ** (decade + 1).astype(np.float64)).astype(np.float32)


_DECADE, _NEXT_DECADE = _decade_edges()
ROW_BINADE = np.append(np.repeat(np.arange(256) - 127, 2), 0)
"""Row -> binary exponent of its magnitudes; the last row is zero itself."""
ROW_DECADE = np.append(np.stack((_DECADE, _DECADE + 1), 1).reshape(-1), 0)
"""Row -> decimal exponent."""
with np.errstate(invalid="ignore"):
    EDGES = np.nan_to_num((np.arange(BINS, dtype=np.uint32) << _SHIFT).view(np.float32).astype(np.float64), nan=np.inf)
"""Bin -> its lower edge; the last ones stand for infinities and NaNs, which are never counted."""


@njit(cache=True, nogil=True)
def _count(
    old,
    new,
    old_bits,
    spacing_bits,
    step_bits,
    changed,
    next_decade,
    shift,
    elements,
    visible,
    hidden,
    changed_rows,
    spacings,
    updates,
):
    for i in range(old.size):
        exponent = (old_bits[i] >> 23) & 255
        if exponent == 255:
            continue
        magnitude = abs(old[i])
        row = 512 if magnitude == 0 else 2 * exponent + (magnitude >= next_decade[exponent])
        spacing = (spacing_bits[i] & 0x7FFFFFFF) >> shift
        elements[row, spacing] += 1
        spacings[spacing] += 1
        if changed[i]:
            changed_rows[row] += 1
        step = (step_bits[i] & 0x7FFFFFFF) >> shift
        if step < (255 << (23 - shift)) and (new[i] != old[i] or changed[i]):
            updates[step] += 1
            if changed[i]:
                visible[row, step] += 1
            else:
                hidden[row, step] += 1


@dataclass
class Margins:
    """Counts of one group of tensors, [bin]: elements by spacing, updates by size; independent of each other."""

    spacings: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    updates: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))


@dataclass
class Tally:
    """Counts of all tensors, [row, bin]: `elements` by spacing; updates by size, `visible` where the served
    bits changed and `hidden` where only the value behind them did (masters, or a shared scale). `changed` [row]."""

    elements: np.ndarray = field(default_factory=lambda: np.zeros((ROWS, BINS), np.int64))
    visible: np.ndarray = field(default_factory=lambda: np.zeros((ROWS, BINS), np.int64))
    hidden: np.ndarray = field(default_factory=lambda: np.zeros((ROWS, BINS), np.int64))
    changed: np.ndarray = field(default_factory=lambda: np.zeros(ROWS, np.int64))

    def add(self, old: np.ndarray, new: np.ndarray, spacing: np.ndarray, changed: np.ndarray, margins: Margins) -> None:
        """Count fp32 values [n] before and after, their cell widths (fp32) and whether their bits changed (bool).

        Values that are not finite before are left out. `margins`: of the group that they belong to.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            step = np.abs(new - old)
        _count(
            old,
            new,
            old.view(np.uint32),
            spacing.view(np.uint32),
            step.view(np.uint32),
            changed,
            _NEXT_DECADE,
            _SHIFT,
            self.elements,
            self.visible,
            self.hidden,
            self.changed,
            margins.spacings,
            margins.updates,
        )


def expected_share(elements: np.ndarray, push: float) -> float:
    """Expected share of changed elements when all are pushed by `push`; `elements` [..., bin] by spacing."""
    counts = elements.reshape(-1, BINS).sum(axis=0)
    total = counts.sum()
    chance = np.where(push < EDGES, push / np.maximum(EDGES, push), 1.0)
    return float((counts * chance).sum() / total) if total else 0.0


def fit_push(elements: np.ndarray, changed: int) -> float | None:
    """The push under which as many elements as `changed` are expected to change; None when none or all did."""
    total = int(elements.sum())
    if not 0 < changed < total:
        return None
    low, high = 1e-45, 1e38
    for _ in range(200):
        middle = float(np.sqrt(low) * np.sqrt(high))
        if expected_share(elements, middle) * total < changed:
            low = middle
        else:
            high = middle
    return high


def share_of_updates(elements: np.ndarray, updates: np.ndarray) -> float:
    """Expected share of changed elements of one row, or of rows of equal spacing, when their updates are known.

    `elements` [bin] by spacing, `updates` [bin] by size; elements without an update stand still.
    """
    total = elements.sum()
    if not total:
        return 0.0
    used = np.flatnonzero(updates)
    weights = updates[used] / total
    centres = (EDGES[used] + EDGES[used + 1]) / 2
    return float(sum(w * expected_share(elements, size) for size, w in zip(centres, weights, strict=True)))


def median_bin(counts: np.ndarray) -> float | None:
    """Lower edge of the bin that holds the (lower) median; None for no counts."""
    total = int(counts.sum())
    if not total:
        return None
    return float(EDGES[int(np.searchsorted(np.cumsum(counts), (total + 1) // 2))])
