"""Hugging Face safetensors read piece by piece, from disk or any fsspec URL, in memory that the caller chooses.

A checkpoint is a file, or a directory with one or several shards; when `model.safetensors.index.json` is there, the
shards it names count and no others (as in transformers). Only headers are read up front; `read` fetches a range.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import fsspec
import torch

from sprawl.delta.state import State
from sprawl.errors import SprawlError

INDEX = "model.safetensors.index.json"
_ACCESS = "check the URL, the network, and the credentials in the environment"
_MAX_HEADER = 100_000_000  # safetensors' own limit
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Form:
    """What a tensor looks like without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


class Source(Protocol):
    """Tensors that can be read in pieces."""

    @property
    def forms(self) -> Mapping[str, Form]:
        """Name -> form, in the order in which reading is cheapest."""

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of the flattened tensor, as far as it has them, in memory of their own."""


class StateSource:
    """A state in memory."""

    def __init__(self, state: State) -> None:
        self._flat = {name: tensor.detach().contiguous().reshape(-1) for name, tensor in state.items()}
        self.forms: dict[str, Form] = {name: Form(t.dtype, tuple(t.shape)) for name, t in state.items()}

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        return self._flat[name][begin:end].clone()


@dataclass(frozen=True)
class _Place:
    file: str
    offset: int


class Checkpoint:
    """An open checkpoint. `forms` is in the order of the files, so that reading along it is sequential.

    Raises SprawlError naming the file when there is no model, a shard is missing, or a header cannot be read.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.forms: dict[str, Form] = {}
        self._places: dict[str, _Place] = {}
        try:
            # A cached listing may hold the size of an object that was replaced since.
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
            for file in self._shards(root.rstrip("/")):
                self._open_shard(file)
        except SprawlError:
            raise
        except ImportError as error:
            raise SprawlError(f"cannot open {url}: {error}", "install the file system it names") from None
        except Exception as error:  # every file system has errors of its own, missing credentials for one
            raise SprawlError(f"cannot open {url}: {_one_line(error)}", _ACCESS) from error

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        form, place = self.forms[name], self._places[name]
        size, end = form.dtype.itemsize, min(end, form.elements)
        if end <= begin:
            return torch.empty(0, dtype=form.dtype)
        start = place.offset + begin * size
        try:
            data = self._fs.cat_file(place.file, start=start, end=start + (end - begin) * size)
        except Exception as error:  # as above
            raise SprawlError(f"cannot read {place.file}: {_one_line(error)}", _ACCESS) from error
        if len(data) != (end - begin) * size:
            raise SprawlError(f"{place.file} ends inside tensor {name!r}", "copy the checkpoint again")
        return torch.frombuffer(bytearray(data), dtype=form.dtype)

    def _shards(self, root: str) -> list[str]:
        if self._fs.isfile(root):
            return [root]
        if self._fs.isfile(f"{root}/{INDEX}"):
            try:
                named = sorted(set(json.loads(self._fs.cat_file(f"{root}/{INDEX}"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError):
                raise SprawlError(f"{root}/{INDEX} is not an index of safetensors shards", "copy it again") from None
            missing = [file for file in named if not self._fs.isfile(f"{root}/{file}")]
            if missing:
                raise SprawlError(f"{root}/{missing[0]} is missing, its index names it", "copy the checkpoint again")
            return [f"{root}/{file}" for file in named]
        if not self._fs.isdir(root):
            raise SprawlError(f"no model at {self.url}", "give a safetensors file or a directory that holds some")
        found = sorted(file for file in self._fs.ls(root, detail=False) if str(file).endswith(".safetensors"))
        if not found:
            raise SprawlError(f"{self.url} holds no .safetensors files", "give the directory with the model's weights")
        return found

    def _open_shard(self, file: str) -> None:
        total = self._fs.size(file) or 0
        try:
            (length,) = struct.unpack("<Q", self._fs.cat_file(file, start=0, end=8))
            if not 0 < length <= min(_MAX_HEADER, total - 8):
                raise ValueError(f"a header of {length} bytes in a file of {total}")
            header = json.loads(self._fs.cat_file(file, start=8, end=8 + length))
            places = sorted(
                ((8 + length + entry["data_offsets"][0], name, entry) for name, entry in _tensors(header)),
                key=lambda place: (place[0], place[1]),
            )
            for offset, name, entry in places:
                form = Form(DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"]))
                end = 8 + length + entry["data_offsets"][1]
                if end > total or end - offset != form.elements * form.dtype.itemsize:
                    raise ValueError(f"tensor {name!r} lies outside the file")
                if name in self.forms:
                    raise SprawlError(f"tensor {name!r} is in more than one shard of {self.url}", "remove old shards")
                self.forms[name] = form
                self._places[name] = _Place(file, offset)
        except SprawlError:
            raise
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SprawlError(
                f"{file} is not a readable safetensors file: {_one_line(error)}", "copy it again, or give another file"
            ) from None


def _tensors(header: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, entry) for name, entry in header.items() if name != "__metadata__"]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
