"""A journal of changes made ready to be written into a model's parameters, on a thread beside the forward passes."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from sprawl.delta.journal import unpack_overwrites
from sprawl.delta.segment import Patch
from sprawl.errors import IntegrityError
from sprawl.rollout.vllm.places import Piece, Write

MARK, JOURNAL = "sprawl.json", "sprawl.journal"  # of `sprawl.board.local_copy`, which is heavy


@dataclass(frozen=True)
class Home:
    """Where one checkpoint tensor lives."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[Piece]


@dataclass
class Staged:
    """The writes that lead from the state with root digest `base` to the one with `target`. `why` says, once `done`,
    that there are none to be had."""

    base: str
    target: str
    writes: list[Write] = field(default_factory=list)
    why: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def leads(self, base: str | None, target: str) -> bool:
        """Whether it is ready and goes this way."""
        return self.done.is_set() and not self.why and (self.base, self.target) == (base, target)

    def write(self) -> None:
        """Replacements, all on the device already."""
        with torch.no_grad():
            for write in self.writes:
                write.do()


def stage(directory: Path, base: str, target: str, homes: Mapping[str, Home]) -> Staged:
    """Begin to make the journal in `directory` ready; nothing is touched. Takes memory for 10 bytes a changed bf16
    element where the parameters are, less for tensors of which most elements change."""
    staged = Staged(base, target)
    threading.Thread(target=_fill, args=(staged, directory, homes), daemon=True).start()
    return staged


def _fill(staged: Staged, directory: Path, homes: Mapping[str, Home]) -> None:
    try:
        staged.writes = _writes(staged, directory, homes)
        for write in staged.writes:  # compiles what it takes
            if write.indices is not None:
                Write(write.target, write.indices[:0], write.values[:0]).do()
        for device in {write.target.device for write in staged.writes if write.target.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
    except Exception as error:  # nothing has been touched: the swap goes the long way
        staged.why = " ".join(f"{type(error).__name__}: {error}".split())
    staged.done.set()


def _writes(staged: Staged, directory: Path, homes: Mapping[str, Home]) -> list[Write]:
    """Raises IntegrityError when the journal does not lead from base to target, LookupError when something that it
    changes has no place."""
    held = json.loads((directory / MARK).read_bytes())["root_digest"]
    overwrites, note = unpack_overwrites((directory / JOURNAL).read_bytes(), str(directory / JOURNAL))
    if (held, note["root_digest"]) != (staged.base, staged.target):
        raise IntegrityError(f"the journal leads from {held} to {note['root_digest']}")
    absent = [name for name in (*overwrites.changed, *overwrites.removed) if name not in homes]
    if absent or overwrites.removed or not overwrites.changed:
        raise LookupError(f"no place is known for {absent[0]}" if absent else "the journal exchanges whole tensors")
    writes: list[Write] = []
    for name, patch in overwrites.patches.items():
        home = homes[name]
        if home.pieces:
            indices, values = _tensors(patch, home.dtype)
            writes += [piece.some(indices, values) for piece in home.pieces]
    for name, tensor in overwrites.whole.items():
        home = homes[name]
        if (tensor.dtype, tuple(tensor.shape)) != (home.dtype, home.shape):
            raise LookupError(f"{name} takes another form")
        writes += [piece.whole(tensor) for piece in home.pieces]
    return writes


def _tensors(patch: Patch, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices i64 [k], ascending, so that writing goes through memory once; values [k] of `dtype`."""
    order = np.argsort(patch.indices)
    signed = patch.values[order].view(np.dtype(f"i{patch.values.itemsize}"))
    return torch.from_numpy(patch.indices[order].astype(np.int64)), torch.from_numpy(signed).view(dtype)
