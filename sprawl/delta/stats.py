"""What changed between two served views, why, and what it costs: numbers behind `sprawl delta stats`.

Streams: memory is bounded by a few pieces of `elements.CHUNK` elements and one codec batch, whatever the checkpoints'
size (about 250 MiB over the interpreter with its libraries).
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from sprawl.delta.checkpoints import Source, StateSource
from sprawl.delta.codec import encode
from sprawl.delta.elements import Piece, is_scale, pieces
from sprawl.delta.encodings import NAMES, foreign_sizes
from sprawl.delta.state import State, raw_bytes
from sprawl.delta.tally import (
    EDGES,
    ROW_BINADE,
    ROW_DECADE,
    Margins,
    Tally,
    expected_share,
    fit_push,
    median_bin,
    share_of_updates,
)

_BATCH = 1 << 23  # elements encoded together
_GROUPS = (
    ("norm", re.compile(r"norm|\.ln_")),  # first: layer norms are often named after what they precede
    ("embedding", re.compile(r"embed|wte|wpe|lm_head")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|ffn|feed_forward|experts")),
)


@dataclass(frozen=True)
class GroupStats:
    """Tensors of one kind: `elements`, how many `changed`, the bytes of a delta of them alone, and whole.

    `predicted`: share expected to change from push and floor, None for what are no weights. `sizes`: bytes of each
    encoding in `encodings.NAMES`.
    """

    group: str
    tensors: int
    elements: int
    changed: int
    delta_bytes: int
    whole_bytes: int
    predicted: float | None = None
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DecadeStats:
    """Elements whose old magnitude is in [10**exponent, 10**(exponent+1)); `exponent` None: zero.

    `floor` is the median half-ulp there: a smaller push leaves the served value as it is.
    `step` is the median |new - old| of the served values that changed (whole ulps, so never below the floor).
    `predicted` is the share expected to change.
    """

    exponent: int | None
    elements: int
    changed: int
    floor: float
    step: float | None
    predicted: float | None = None


@dataclass(frozen=True)
class Cell:
    """`count` weights of old magnitude from 2**`binade` were updated by `step`; `visible`: served bits changed."""

    binade: int
    step: float
    count: int
    visible: bool


@dataclass(frozen=True)
class DeltaStats:
    """`push`: the update size behind `predicted`. `push_is`: `given`, `fitted` (one number that explains the total
    share; the shares by magnitude and group test it) or `measured` (masters: every update is known, this is the
    median). `binades`: as decades, by powers of two. `cells`: updates by magnitude and size, for the figure."""

    groups: list[GroupStats]
    decades: list[DecadeStats]
    total: GroupStats
    push: float | None = None
    push_is: str = "fitted"
    binades: list[DecadeStats] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def group_of(name: str) -> str:
    """embedding, norm, attention, mlp, scale (of a quantised matrix) or other, by the tensor's Hugging Face name."""
    if is_scale(name):
        return "scale"
    return next((group for group, pattern in _GROUPS if pattern.search(name)), "other")


class _Group:
    """Counts of one group, and a batch of pieces that waits to be encoded."""

    def __init__(self) -> None:
        self.tensors = self.elements = self.changed = self.delta_bytes = self.whole_bytes = 0
        self.sizes = dict.fromkeys(NAMES, 0)
        self.margins = Margins()
        self._old: State = {}
        self._new: State = {}
        self._waiting = 0

    def add(self, piece: Piece) -> None:
        self.elements += piece.changed.size
        self.changed += int(piece.changed.sum())
        self.whole_bytes += piece.new.numel() * piece.new.element_size()
        name = f"{piece.name}#{len(self._new)}"
        self._new[name] = piece.new
        if piece.old is not None:
            self._old[name] = piece.old
            integers = [raw_bytes(t).view(f"u{t.element_size()}") for t in (piece.old, piece.new)]
            for encoding, size in foreign_sizes(integers[0], integers[1]).items():
                self.sizes[encoding] += size
        else:
            for encoding in self.sizes:
                self.sizes[encoding] += piece.new.numel() * piece.new.element_size()
        self._waiting += piece.new.numel()
        if self._waiting >= _BATCH:
            self.flush()

    def flush(self) -> None:
        if self._new:
            self.delta_bytes += len(encode(self._old, self._new).blob)
        self._old, self._new, self._waiting = {}, {}, 0


def delta_stats(
    old: State | Source, new: State | Source, *, push: float | None = None, serve: torch.dtype | None = None
) -> DeltaStats:
    """Compare two views. Tensors on one side only are counted as changed (new) or ignored (removed).

    `push`: size of an update between the two, to predict with; fitted when not given. `serve`: fp32 tensors are
    masters served in this dtype, so that every update is known, also those that no served value shows.
    """
    before = StateSource(old) if isinstance(old, dict) else old
    after = StateSource(new) if isinstance(new, dict) else new
    groups: dict[str, _Group] = {}
    tally = Tally()
    masters = 0
    for name, form in after.forms.items():
        group = groups.setdefault(group_of(name), _Group())
        group.tensors += 1
        masters += serve is not None and form.dtype in (torch.float32, torch.float64)
        for piece in pieces(before, after, name, serve):
            group.add(piece)
            if piece.values is not None:
                tally.add(*piece.values, piece.changed, group.margins)
    for group in groups.values():
        group.flush()
    return _summary(groups, tally, push, measured=masters > 0)


def _summary(groups: dict[str, _Group], tally: Tally, push: float | None, *, measured: bool) -> DeltaStats:
    if push is not None:
        kind = "given"
    elif measured:
        kind, push = "measured", median_bin((tally.visible + tally.hidden).sum(axis=0))
    else:
        kind, push = "fitted", fit_push(tally.elements.sum(axis=0), int(tally.changed.sum()))
    rows = [_row_share(tally, row, push, kind) for row in range(len(ROW_BINADE))]
    stats = [
        GroupStats(
            name,
            group.tensors,
            group.elements,
            group.changed,
            group.delta_bytes,
            group.whole_bytes,
            _group_share(group, push, kind),
            group.sizes,
        )
        for name, group in sorted(groups.items())
    ]
    decades = [_bin(tally, members, exponent, rows) for exponent, members in _members(tally, ROW_DECADE)]
    return DeltaStats(
        stats,
        decades,
        _total(stats, tally, rows),
        push,
        kind,
        [_bin(tally, members, exponent, rows) for exponent, members in _members(tally, ROW_BINADE)],
        _cells(tally),
    )


def _group_share(group: _Group, push: float | None, kind: str) -> float | None:
    spacings, updates = group.margins.spacings, group.margins.updates
    if push is None or not spacings.any():
        return None
    return share_of_updates(spacings, updates) if kind == "measured" else expected_share(spacings, push)


def _row_share(tally: Tally, row: int, push: float | None, kind: str) -> float | None:
    if push is None:
        return None
    if kind == "measured":
        return share_of_updates(tally.elements[row], tally.visible[row] + tally.hidden[row])
    return expected_share(tally.elements[row], push)


def _members(tally: Tally, exponents: np.ndarray) -> list[tuple[int | None, np.ndarray]]:
    """(exponent, rows that have it and hold elements), largest first, zero last."""
    used = np.flatnonzero(tally.elements.any(axis=1))
    zero = len(exponents) - 1
    found: list[tuple[int | None, np.ndarray]] = [
        (int(e), used[(exponents[used] == e) & (used != zero)])
        for e in sorted(set(exponents[used[used != zero]].tolist()), reverse=True)
    ]
    return [*found, (None, np.array([zero]))] if zero in used else found


def _bin(tally: Tally, rows: np.ndarray, exponent: int | None, shares: list[float | None]) -> DecadeStats:
    counts = tally.elements[rows].sum(axis=1)
    return DecadeStats(
        exponent=exponent,
        elements=int(counts.sum()),
        changed=int(tally.changed[rows].sum()),
        floor=(median_bin(tally.elements[rows].sum(axis=0)) or 0.0) / 2,
        step=median_bin(tally.visible[rows].sum(axis=0)),
        predicted=_weighted(shares, rows, counts),
    )


def _weighted(shares: list[float | None], rows: np.ndarray, counts: np.ndarray) -> float | None:
    known = [share for row in rows if (share := shares[row]) is not None]
    return float(np.average(known, weights=counts)) if len(known) == len(rows) and counts.sum() else None


def _total(stats: list[GroupStats], tally: Tally, shares: list[float | None]) -> GroupStats:
    rows = np.flatnonzero(tally.elements.any(axis=1))
    sizes = {encoding: sum(group.sizes[encoding] for group in stats) for encoding in NAMES}
    return GroupStats(
        group="all",
        tensors=sum(group.tensors for group in stats),
        elements=sum(group.elements for group in stats),
        changed=sum(group.changed for group in stats),
        delta_bytes=sum(group.delta_bytes for group in stats),
        whole_bytes=sum(group.whole_bytes for group in stats),
        predicted=_weighted(shares, rows, tally.elements[rows].sum(axis=1)),
        sizes=sizes,
    )


def _cells(tally: Tally) -> list[Cell]:
    cells = []
    for visible, counts in ((True, tally.visible), (False, tally.hidden)):
        by_binade = counts[:-1].reshape(256, 2, -1).sum(axis=1)
        for binade, step in zip(*np.nonzero(by_binade), strict=True):
            cells.append(Cell(int(binade) - 127, float(EDGES[step]), int(by_binade[binade, step]), visible))
    return cells
