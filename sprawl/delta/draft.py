"""A delta in the making: for each tensor the form it is sent in, and the parts of the blob."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from sprawl.delta import kernels
from sprawl.delta.bits import BITS, PACKED, Bits, holds_nibbles
from sprawl.delta.pool import Pool
from sprawl.delta.scan import (
    Found,
    Piece,
    Words,
    choose_partition,
    fetch,
    near,
    sample,
    scan_unit,
    size_of,
    units,
    words_of,
)
from sprawl.delta.segment import LIMIT, Segment, batches, encode_segment
from sprawl.delta.state import State, dtype_name
from sprawl.delta.whole import pack_tensor

# Above this share of changed elements, in a sample, a tensor is coded both ways and the smaller form is sent.
_TRY_WHOLE = 0.5
_SAMPLE = 16, 128  # runs, and elements of each
_STRIDE = 1 << 24  # elements counted at a time


@dataclass(frozen=True)
class TensorInfo:
    """How one tensor was sent. `changed` elements; all of them for a tensor that is new or changed dtype or shape."""

    kind: Literal["unchanged", "delta", "whole"]
    elements: int
    changed: int


@dataclass
class Draft:
    """Header entries (JSON-able) and the payload they describe: first all segments, then the whole tensors."""

    infos: dict[str, TensorInfo] = field(default_factory=dict)
    segments: list[dict[str, Any]] = field(default_factory=list)
    whole: list[dict[str, Any]] = field(default_factory=list)
    segment_parts: list[bytes] = field(default_factory=list)
    whole_parts: list[bytes] = field(default_factory=list)


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, sharing memory: uint8 [nbytes]."""
    return tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def count_changed(old: Words, new: Words) -> int:
    """Elements whose bits differ. Fetched from a device in parts."""
    return sum(
        int(kernels.count_changed(fetch(old, at, at + _STRIDE), fetch(new, at, at + _STRIDE)))
        for at in range(0, size_of(new), _STRIDE)
    )


def same_form(old: torch.Tensor | None, new: torch.Tensor) -> bool:
    return old is not None and old.dtype == new.dtype and old.shape == new.shape


def _mostly_changed(old: Words, new: Words) -> bool:
    changed, seen = kernels.sample_changes(near(old, *_SAMPLE), near(new, *_SAMPLE), *_SAMPLE)
    return changed > _TRY_WHOLE * seen


class Drafter:
    """Compares two states of contiguous tensors; `draft` is the result."""

    def __init__(self, base: State, new: State, pool: Pool) -> None:
        self._base, self._new, self._pool = base, new, pool
        self._old_words: dict[str, Words] = {}
        self._new_words: dict[str, Words] = {}
        self.draft = Draft()

    def run(self) -> Draft:
        plain: dict[torch.dtype, list[str]] = {}
        packed: dict[torch.dtype, list[str]] = {}
        for name in sorted(self._new):
            old, new = self._base.get(name), self._new[name]
            if old is None or not same_form(old, new):
                self._send_whole(name, pack_tensor(new), new.numel())
            elif new.dtype not in BITS or new.numel() > LIMIT:
                self._compare_bytes(name, old, new)
            elif new.numel() == 0:
                self.draft.infos[name] = TensorInfo("unchanged", 0, 0)
            elif self._is_packed(name, old, new):
                packed.setdefault(new.dtype, []).append(name)
            elif not (_mostly_changed(self._old_words[name], self._new_words[name]) and self._settle(name)):
                plain.setdefault(new.dtype, []).append(name)
        for dtype in sorted(plain, key=str):
            self._send_all(plain[dtype], (BITS[dtype],))
        for dtype in sorted(packed, key=str):
            self._send_all(packed[dtype], PACKED[dtype])
        return self.draft

    def _is_packed(self, name: str, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Also sets the tensor's words: its bytes if it holds packed codes."""
        words = words_of(old)
        packs = new.dtype in PACKED and new.nbytes <= LIMIT and holds_nibbles(sample(words, *_SAMPLE))
        self._old_words[name] = words_of(octets(old)) if packs else words
        self._new_words[name] = words_of(octets(new)) if packs else words_of(new)
        return packs

    def _code(self, names: Sequence[str], lanes: tuple[Bits, ...]) -> Iterator[tuple[list[Found], Segment]]:
        base, new = self._old_words, self._new_words
        partition = choose_partition(names, base, new, lanes)

        def scan(unit: list[Piece]) -> Found:
            return scan_unit(unit, base, new, lanes, partition)

        def code(batch: list[Found]) -> tuple[list[Found], Segment]:
            return batch, encode_segment(batch, partition, lanes[0])

        return self._pool.map(code, batches(self._pool.map(scan, units(names, new))))

    def _settle(self, name: str) -> bool:
        """Send a tensor that changed a lot whole, if that is smaller. False when it is better as a delta."""
        lanes = (BITS[self._new[name].dtype],)
        size = sum(len(segment.payload) for _, segment in self._code([name], lanes))
        frames = pack_tensor(self._new[name])
        if sum(map(len, frames)) >= size:
            return False
        self._send_whole(name, frames, count_changed(self._old_words[name], self._new_words[name]))
        return True

    def _compare_bytes(self, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
        if count_changed(words_of(octets(old)), words_of(octets(new))):
            self._send_whole(name, pack_tensor(new), new.numel())
        else:
            self.draft.infos[name] = TensorInfo("unchanged", new.numel(), 0)

    def _send_whole(self, name: str, frames: list[bytes], changed: int) -> None:
        tensor = self._new[name]
        form = {"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        self.draft.whole.append({**form, "frames": [len(frame) for frame in frames]})
        self.draft.whole_parts += frames
        self.draft.infos[name] = TensorInfo("whole", tensor.numel(), changed)

    def _send_all(self, names: Sequence[str], lanes: tuple[Bits, ...]) -> None:
        changed = dict.fromkeys(names, 0)
        for batch, segment in self._code(names, lanes):
            pieces: list[list[Any]] = []
            for unit in batch:
                for piece, counts in zip(unit.pieces, unit.changed, strict=True):
                    changed[piece.name] += sum(counts)
                    if len(lanes) == 1 and pieces and pieces[-1][0] == piece.name:
                        pieces[-1][2:] = [piece.stop, [pieces[-1][3][0] + counts[0]]]
                    else:
                        pieces.append([piece.name, piece.start, piece.stop, counts])
            if segment.payload:
                entry = {"packed": len(lanes) > 1, "pieces": pieces, "size": len(segment.payload)}
                self.draft.segments.append({**entry, **segment.header})
                self.draft.segment_parts.append(segment.payload)
        for name, count in changed.items():
            old, tensor = self._base[name], self._new[name]
            if count and len(lanes) > 1:
                count = count_changed(
                    words_of(old), words_of(tensor)
                )  # of the tensor's own elements, which hold several codes each
            self.draft.infos[name] = TensorInfo("delta" if count else "unchanged", tensor.numel(), count)
