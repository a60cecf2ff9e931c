"""Master weights between two checkpoints as a lossless delta, and which checkpoint each one is a delta against.

The anchor reads checkpoints c steps apart: those, and the first one, are *hubs*. A hub is a delta against the hub
before it, which the anchor holds already, and every n-th is whole; any other checkpoint is a delta against the newest
hub, so nothing but hubs is ever a base. Without an anchor every checkpoint is a hub.

A delta is a safetensors file of bytes. Its metadata say what the masters are and how they were cut: each tensor named
by a number is a `sprawl.delta` container over the elements that its entry in `parts` lists, at most `PART` of them, so
that neither end needs more memory than the masters, a part's patch (8 bytes an element) and the blob.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import save

from sprawl.config import RunConfig
from sprawl.delta.codec import apply, decode, encode
from sprawl.delta.state import State, dtype_name
from sprawl.errors import IntegrityError

FORMAT = "sprawl-masters-1"
PART = 1 << 24

Cut = tuple[str, int, int]
"""Elements [start, stop) of a tensor, in row-major order."""


@dataclass(frozen=True)
class DeltaPlan:
    """Which masters are whole. `stride`: steps between hubs; `offset`: hubs are the steps s > 0 where s + offset is a
    multiple of it; every `whole_every`-th hub is whole."""

    stride: int
    offset: int
    whole_every: int

    @classmethod
    def of(cls, config: RunConfig) -> DeltaPlan:
        anchor, checkpoint = config.anchor, config.checkpoint
        if anchor.enabled:
            return cls(anchor.every, anchor.lag, checkpoint.whole_every)
        return cls(checkpoint.every, 0, checkpoint.whole_every)

    def is_hub(self, step: int) -> bool:
        return step == 0 or (step + self.offset) % self.stride == 0

    def base(self, step: int) -> int | None:
        """Step of the checkpoint that the one of `step` is a delta against; None: it is whole."""
        if step == 0 or self.whole_every == 1 or (self.is_hub(step) and self._number(step) % self.whole_every == 0):
            return None
        return max(0, step - ((step + self.offset) % self.stride or self.stride))

    def _number(self, hub: int) -> int:
        """0 for the first checkpoint, 1 for the next hub, and so on."""
        return (hub + self.offset) // self.stride - self.offset // self.stride


def encode_masters(base: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], threads: int = 1) -> bytes:
    """The delta that turns `base` into `new`, bit for bit. Neither is modified. Deterministic.

    Raises ValueError when the two do not have the same tensors, dtypes and shapes.
    """
    table = _table(new)
    if table != _table(base):
        raise ValueError("the masters to be compared have other tensors, dtypes or shapes")
    parts = list(_cuts(new))
    blobs = [encode(_pieces(base, part), _pieces(new, part), threads=threads).blob for part in parts]
    # One metadata entry: safetensors writes several in random order.
    about = {"masters": json.dumps({"format": FORMAT, "tensors": table, "parts": parts})}
    return save(
        {f"{at:06d}": torch.frombuffer(bytearray(blob), dtype=torch.uint8) for at, blob in enumerate(blobs)}, about
    )


def apply_masters(state: State, blob: bytes, name: str, threads: int = 1) -> None:
    """Turn the base in `state` into what the delta makes of it, in place. Its tensors must be contiguous.

    Raises IntegrityError naming the blob (`name`) when it is damaged or a delta of something else; `state` is then
    partly patched and of no use.
    """
    table, parts, payload = _open(blob, name)
    if table != _table(state):
        raise IntegrityError(
            f"{name} is a delta of other masters: its tensors, dtypes or shapes are not those of its base"
        )
    for part, data in zip(parts, payload, strict=True):
        pieces = _pieces(state, part)
        apply(pieces, decode(pieces, bytes(data), name=name, threads=threads))


def _table(state: Mapping[str, torch.Tensor]) -> list[list[object]]:
    return [[name, dtype_name(state[name].dtype), list(state[name].shape)] for name in sorted(state)]


def _cuts(state: Mapping[str, torch.Tensor]) -> Iterator[list[Cut]]:
    """All elements of all tensors, at most `PART` together."""
    part: list[Cut] = []
    room = PART
    for name in sorted(state):
        size, start = state[name].numel(), 0
        while start < size:
            stop = min(size, start + room)
            part.append((name, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield part
                part, room = [], PART
    if part:
        yield part


def _pieces(state: Mapping[str, torch.Tensor], part: list[Cut]) -> State:
    """The elements of a part, sharing memory with `state` where its tensors are contiguous."""
    return {f"{at:06d}": state[name].detach().reshape(-1)[start:stop] for at, (name, start, stop) in enumerate(part)}


def _open(blob: bytes, name: str) -> tuple[list[list[object]], list[list[Cut]], list[memoryview]]:
    try:
        size = int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8 : 8 + size])
        about = json.loads(header["__metadata__"]["masters"])
        if about["format"] != FORMAT:
            raise IntegrityError(f"{name} has format {about['format']!r}, this release knows {FORMAT}")
        table = about["tensors"]
        parts = [[(str(tensor), int(start), int(stop)) for tensor, start, stop in part] for part in about["parts"]]
        body = memoryview(blob)[8 + size :]
        places = [header[f"{at:06d}"]["data_offsets"] for at in range(len(parts))]
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{name} is not a delta of masters: {error!r}") from None
    return table, parts, [body[start:stop] for start, stop in places]
