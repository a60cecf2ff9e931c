"""A version as a Hugging Face checkpoint on this machine's disk, patched in place and safe to kill at any moment.

    model.safetensors   the weights, one file
    sprawl.json         which version they are: run, version, root digest
    sprawl.journal      only while a patch is under way: the decoded overwrites and where they lead

A step is: compute that it leads to the published root digest, write the journal (durably), patch the mapped file,
flush, write sprawl.json, delete the journal. Overwrites are replacements, so replaying a journal over a half-patched
file is applying it once. What `open` hands out always has the root digest that was published; anything else is an
IntegrityError. Tell an engine to load the files after a step, not during one.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from sprawl.board.local import replace_durably, sync_directory
from sprawl.board.manifest import Manifest
from sprawl.board.reader import Prepared, Served, VersionReader
from sprawl.delta.codec import Overwrites, apply
from sprawl.delta.files import WEIGHTS
from sprawl.delta.journal import pack_overwrites, unpack_overwrites
from sprawl.delta.state import State, root_digest, tensor_digests
from sprawl.delta.whole import encode_whole
from sprawl.errors import BoardError, IntegrityError, SprawlError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

MARK = "sprawl.json"
JOURNAL = "sprawl.journal"


class Mark(BaseModel):
    """sprawl.json. `root_digest` is that of the state in model.safetensors."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    run_id: str
    version: int
    root_digest: str


@dataclass
class LocalCopy:
    """An open copy. `served.state` are tensors that map the file; patching them patches it."""

    directory: Path
    run_id: str
    served: Served
    _map: mmap.mmap

    @classmethod
    def open(cls, directory: str | Path) -> LocalCopy | None:
        """The copy in a directory, after finishing or forgetting what a killed process began. None when there is none.

        Reads and hashes the whole file. Raises IntegrityError when the weights are not the version they say they are
        and no journal explains it.
        """
        directory = Path(directory)
        mark = _read_mark(directory / MARK)
        if mark is None or not (directory / WEIGHTS).exists():
            return None
        state, mapped = map_weights(directory / WEIGHTS)
        digests = tensor_digests(state)
        root = root_digest(digests)
        journal = _read_journal(directory / JOURNAL)
        copy = cls(directory, mark.run_id, Served(mark.version, state, digests, root), mapped)
        if root != mark.root_digest:
            copy._recover(mark, journal)
        (directory / JOURNAL).unlink(missing_ok=True)
        return copy

    @classmethod
    def create(cls, directory: str | Path, run_id: str, served: Served) -> LocalCopy:
        """Write a whole state; an older copy in the directory is replaced. Raises SprawlError when it cannot be."""
        directory = Path(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # What a killed process left half-written has a name with a dot.
            others = [file.name for file in directory.glob("[!.]*.safetensors*") if file.name != WEIGHTS]
            if others:
                raise SprawlError(f"{directory} already holds {others[0]}", "choose an empty directory")
            # Without a mark the directory holds no copy, so that weights and mark never disagree.
            (directory / MARK).unlink(missing_ok=True)
            (directory / JOURNAL).unlink(missing_ok=True)
            sync_directory(directory)
            replace_durably(directory / WEIGHTS, encode_whole(served.state))
            _write_mark(directory, Mark(run_id=run_id, version=served.version, root_digest=served.root))
        except OSError as error:
            raise SprawlError(f"cannot write {directory}: {error.strerror or error}") from None
        state, mapped = map_weights(directory / WEIGHTS)
        return cls(directory, run_id, Served(served.version, state, dict(served.digests), served.root), mapped)

    def step(self, reader: VersionReader, prepared: Prepared) -> None:
        """Take the copy to `prepared.version`. Raises IntegrityError as `VersionReader.commit`, SprawlError when the
        disk fails; open the directory again after either."""
        target = Mark(run_id=self.run_id, version=prepared.version, root_digest=prepared.manifest.root_digest)
        reader.check(self.served, prepared)
        try:
            replace_durably(self.directory / JOURNAL, pack_overwrites(prepared.overwrites, target.model_dump()))
            if _in_place(self.served.state, prepared.overwrites):
                reader.commit(self.served, prepared)
                self._map.flush()
            else:
                self._rewrite(reader, prepared)
            _write_mark(self.directory, target)
            (self.directory / JOURNAL).unlink()
            sync_directory(self.directory)
        except OSError as error:
            raise SprawlError(f"cannot write {self.directory}: {error.strerror or error}") from None

    def _rewrite(self, reader: VersionReader, prepared: Prepared) -> None:
        """Names, shapes or dtypes change: the file is written anew and exchanged once its digest is right."""
        state = {name: tensor.clone() for name, tensor in self.served.state.items()}
        scratch = Served(self.served.version, state, dict(self.served.digests), self.served.root)
        reader.commit(scratch, prepared)
        replace_durably(self.directory / WEIGHTS, encode_whole(scratch.state))
        mapped_state, self._map = map_weights(self.directory / WEIGHTS)
        self.served = Served(scratch.version, mapped_state, scratch.digests, scratch.root)

    def _recover(self, mark: Mark, journal: tuple[Overwrites, Mark] | None) -> None:
        """The file is neither the version before nor certainly the one after: write everything again, then look."""
        found = self.served.root
        if journal is not None:
            overwrites, mark_after = journal
            if found != mark_after.root_digest and _in_place(self.served.state, overwrites):
                apply(self.served.state, overwrites)
                self._map.flush()
                self.served.digests = tensor_digests(self.served.state)
                found = root_digest(self.served.digests)
            mark = mark_after
        if found != mark.root_digest:
            raise IntegrityError(
                f"{self.directory / WEIGHTS} is damaged: it should be version {mark.version} of run {mark.run_id!r} "
                f"with root digest {mark.root_digest}, it has {found}",
                "delete the directory and fetch it again",
            )
        self.run_id, self.served.version, self.served.root = mark.run_id, mark.version, found
        _write_mark(self.directory, mark)


def pull(reader: VersionReader, directory: str | Path, version: int) -> tuple[LocalCopy, Manifest, str | None]:
    """Bring the copy in `directory` to `version`, from what is there or from nothing.

    Returns the copy, the version's manifest, and why an unusable copy was thrown away, if one was. Raises BoardError
    when the version is not on the board or the copy is newer, IntegrityError when the board is damaged.
    """
    manifest = reader.require(version)
    discarded = None
    try:
        copy = LocalCopy.open(directory)
    except IntegrityError as error:
        copy, discarded = None, error.message
    if copy is not None and copy.run_id != reader.run_id:
        raise BoardError(f"{directory} holds a version of run {copy.run_id!r}", "choose another directory")
    if copy is None:
        return LocalCopy.create(directory, reader.run_id, reader.materialise(version)), manifest, discarded
    if copy.served.version > version:
        raise BoardError(
            f"{directory} holds version {copy.served.version}, which is newer than {version}",
            "choose another directory for an older version",
        )
    if copy.served.version < version:
        copy.step(reader, reader.prepare(copy.served, version))
    elif copy.served.root != manifest.root_digest:
        raise IntegrityError(
            f"{directory} holds version {version} with root digest {copy.served.root}, the board has "
            f"{manifest.root_digest} under this number: the version was published again",
            "delete the directory and fetch it again",
        )
    return copy, manifest, discarded


def _in_place(state: State, overwrites: Overwrites) -> bool:
    """Whether no tensor comes, goes or changes its form."""
    same = (
        name in state and state[name].dtype == tensor.dtype and state[name].shape == tensor.shape
        for name, tensor in overwrites.whole.items()
    )
    return all(same) and not any(name in state for name in overwrites.removed)


def map_weights(path: Path) -> tuple[State, mmap.mmap]:
    """Tensors that share memory with the file. Raises IntegrityError when it is not safetensors."""
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    try:
        (size,) = struct.unpack("<Q", mapped[:8])
        header: dict[str, Any] = json.loads(mapped[8 : 8 + size])
        header.pop("__metadata__", None)
        return {name: _view(mapped, 8 + size, form) for name, form in header.items()}, mapped
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise IntegrityError(f"{path} is not valid safetensors: {error}") from None


def _view(mapped: mmap.mmap, start: int, form: dict[str, Any]) -> torch.Tensor:
    dtype = _DTYPES[form["dtype"]]
    begin, end = form["data_offsets"]
    if begin == end:
        return torch.empty(form["shape"], dtype=dtype)
    count = (end - begin) // dtype.itemsize
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start + begin).reshape(form["shape"])


def _read_mark(path: Path) -> Mark | None:
    try:
        return Mark.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise IntegrityError(f"{path} is not readable: {error}", "delete the directory and fetch it again") from None


def _write_mark(directory: Path, mark: Mark) -> None:
    replace_durably(directory / MARK, mark.model_dump_json().encode())


def _read_journal(path: Path) -> tuple[Overwrites, Mark] | None:
    try:
        overwrites, note = unpack_overwrites(path.read_bytes(), str(path))
        return overwrites, Mark.model_validate(note)
    except (FileNotFoundError, IntegrityError, ValidationError):
        return None
