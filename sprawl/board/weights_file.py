"""One safetensors file as memory: written without a second copy of the weights, mapped so that patching tensors patches
the file."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sprawl.delta.checkpoints import DTYPES
from sprawl.delta.state import State, raw_bytes
from sprawl.errors import IntegrityError, SprawlError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def weights_chunks(state: State) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces: the header, then views of the tensors' own bytes.

    Tensors are ordered by falling element size, then by name, so that each is aligned in the file. Raises SprawlError
    before the first piece when a dtype has no name in safetensors.
    """
    order = sorted(state, key=lambda name: (-state[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        tensor = state[name]
        if tensor.dtype not in _NAMES:
            raise SprawlError(f"tensor {name!r} cannot be written as safetensors: its dtype is {tensor.dtype}")
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        if state[name].numel():
            yield raw_bytes(state[name]).data


def map_weights(path: Path) -> tuple[State, mmap.mmap]:
    """Tensors that share memory with the file. Raises IntegrityError when it is not safetensors."""
    try:
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        (size,) = struct.unpack("<Q", mapped[:8])
        header: dict[str, Any] = json.loads(mapped[8 : 8 + size])
        header.pop("__metadata__", None)
        return {name: _view(mapped, 8 + size, form) for name, form in header.items()}, mapped
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error) as error:
        raise IntegrityError(f"{path} is not valid safetensors: {error}") from None


def _view(mapped: mmap.mmap, start: int, form: dict[str, Any]) -> torch.Tensor:
    dtype = DTYPES[form["dtype"]]
    begin, end = form["data_offsets"]
    if begin == end:
        return torch.empty(form["shape"], dtype=dtype)
    count = (end - begin) // dtype.itemsize
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + begin).reshape(form["shape"])
