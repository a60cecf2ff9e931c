"""A version as a Hugging Face checkpoint on this machine's disk, patched in place and safe to kill at any moment.

    model.safetensors   the weights, one file
    sprawl.json         which version they are: run, version, root digest
    sprawl.journal      only while a step is under way: the decoded overwrites and where they lead

A step is staged, committed and settled. Staging does everything that takes time or room and touches nothing: it writes
the journal and the next sprawl.json beside the old one. Committing patches the mapped file and exchanges sprawl.json.
Settling flushes the file and deletes the journal. Overwrites are replacements, so replaying a journal over a
half-patched file is applying it once. A whole new file (the first, another run, tensors of another form) is written
beside the old one and exchanged; its journal only says where it leads.

What `open` hands out always has the root digest that was published; anything else is an IntegrityError. On disk are at
most two times the weights, in memory the mapped file. Tell an engine to load the files after a commit, not during one,
and let nobody else write in the directory (`hold`).
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sprawl.board.directory_lock import hold
from sprawl.board.local import beside, exchange, replace_durably, sync_directory, write_beside
from sprawl.board.manifest import Manifest
from sprawl.board.reader import Prepared, Served, VersionReader
from sprawl.board.weights_file import map_weights, weights_chunks
from sprawl.delta.codec import Overwrites, apply
from sprawl.delta.files import WEIGHTS
from sprawl.delta.journal import pack_overwrites, unpack_overwrites
from sprawl.delta.state import State, root_digest, state_bytes, tensor_digests
from sprawl.errors import BoardError, IntegrityError, SprawlError, file_failure

MARK = "sprawl.json"
JOURNAL = "sprawl.journal"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Mark(BaseModel):
    """sprawl.json. `root_digest` is that of the state in model.safetensors."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    run_id: str
    version: int
    root_digest: str


@dataclass(frozen=True)
class Staged:
    """A step that is on disk and has touched nothing. `prepared` patches the file in place; None: a whole new file
    with `digests` waits beside it."""

    mark: Mark
    prepared: Prepared | None
    digests: dict[str, str]


@dataclass
class LocalCopy:
    """An open copy. `served.state` are tensors that map the file; patching them patches it."""

    directory: Path
    run_id: str
    served: Served
    _map: mmap.mmap

    @classmethod
    def open(cls, directory: str | Path) -> LocalCopy | None:
        """The copy in a directory, after finishing what a killed process had staged. None when there is none.

        Reads and hashes the whole file. Raises IntegrityError when the weights are not the version they say they are
        and no journal explains it, SprawlError when the directory cannot be read or written.
        """
        directory = Path(directory)
        with _failures(directory):
            mark, journal = _read_mark(directory / MARK), _read_journal(directory / JOURNAL)
            if journal is not None:
                _finish_exchange(directory, journal[1])
            if (mark is None and journal is None) or not (directory / WEIGHTS).exists():
                _clean(directory)
                return None
            state, mapped = map_weights(directory / WEIGHTS)
            digests = tensor_digests(state)
            copy = cls(directory, "", Served(-1, state, digests, root_digest(digests)), mapped)
            copy._identify(mark, journal)
            copy.settle()
        return copy

    @classmethod
    def create(cls, directory: str | Path, run_id: str, served: Served) -> LocalCopy:
        """Write a whole state; an older copy in the directory is replaced. Raises SprawlError when it cannot be."""
        copy = cls.exchange(directory, stage_whole(directory, run_id, served))
        copy.settle()
        return copy

    @classmethod
    def exchange(cls, directory: str | Path, staged: Staged) -> LocalCopy:
        """Put the whole new file of `stage_whole` in the place of the old one. `settle` it afterwards."""
        directory = Path(directory)
        with _failures(directory):
            exchange(directory / WEIGHTS)
            exchange(directory / MARK)
            state, mapped = map_weights(directory / WEIGHTS)
        mark = staged.mark
        return cls(directory, mark.run_id, Served(mark.version, state, dict(staged.digests), mark.root_digest), mapped)

    def stage(self, reader: VersionReader, prepared: Prepared) -> Staged:
        """Make sure that `prepared` gives the published state, and write down how. Touches nothing.

        Raises IntegrityError as `VersionReader.commit`, SprawlError when the disk is full or fails; the copy is as it
        was after either.
        """
        self.settle()
        if not _in_place(self.served.state, prepared.overwrites):
            return self._stage_new_forms(reader, prepared)
        reader.check(self.served, prepared)
        mark = Mark(run_id=self.run_id, version=prepared.version, root_digest=prepared.manifest.root_digest)
        journal = pack_overwrites(_bounded(self.served.state, prepared.overwrites), mark.model_dump())
        with _failures(self.directory), _all_or_nothing(self.directory):
            write_beside(self.directory / MARK, [mark.model_dump_json().encode()])
            replace_durably(self.directory / JOURNAL, *journal)
        return Staged(mark, prepared, {})

    def commit(self, reader: VersionReader, staged: Staged) -> None:
        """Take the copy to what `stage` wrote down last. `served` is then at the new version.

        Raises IntegrityError when the result is not the published state, SprawlError when the disk fails: open the
        directory again after either.
        """
        if staged.prepared is None:
            new = LocalCopy.exchange(self.directory, staged)
            self.run_id, self.served, self._map = new.run_id, new.served, new._map
            return
        reader.commit(self.served, staged.prepared)
        with _failures(self.directory):
            exchange(self.directory / MARK)

    def settle(self) -> None:
        """Make a commit as durable as the disk is, and forget the journal. Until then the journal stands for it."""
        with _failures(self.directory):
            if (self.directory / JOURNAL).exists():
                self._map.flush()
            _clean(self.directory)

    def step(self, reader: VersionReader, prepared: Prepared) -> None:
        """Stage, commit and settle."""
        self.commit(reader, self.stage(reader, prepared))
        self.settle()

    def _stage_new_forms(self, reader: VersionReader, prepared: Prepared) -> Staged:
        """Names, shapes or dtypes change: made in memory, as far as it differs, and written as a new file."""
        changed = set(prepared.changed)
        state = {name: t.clone() if name in changed else t for name, t in self.served.state.items()}
        scratch = Served(self.served.version, state, dict(self.served.digests), self.served.root)
        reader.commit(scratch, prepared)
        return stage_whole(self.directory, self.run_id, scratch)

    def _identify(self, mark: Mark | None, journal: tuple[Overwrites, Mark] | None) -> None:
        """Find out which version the file is, after replaying the journal over it."""
        served = self.served
        leads_to = journal[1] if journal is not None else None
        if journal is not None and served.root != journal[1].root_digest and _in_place(served.state, journal[0]):
            apply(served.state, journal[0])
            served.digests = tensor_digests(served.state)
            served.root = root_digest(served.digests)
        found = next((m for m in (leads_to, mark) if m is not None and m.root_digest == served.root), None)
        if found is None:
            said = leads_to or mark
            assert said is not None
            raise _damaged(self.directory, said, served.root)
        self.run_id, served.version = found.run_id, found.version
        if found != mark:
            replace_durably(self.directory / MARK, found.model_dump_json().encode())


def stage_whole(directory: str | Path, run_id: str, served: Served) -> Staged:
    """Write a whole state beside the copy in `directory`, if there is one; needs room for both.

    Raises SprawlError when there is no room, or when the directory holds a model that is not a copy of ours.
    """
    directory = Path(directory)
    mark = Mark(run_id=run_id, version=served.version, root_digest=served.root)
    with _failures(directory):
        directory.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(directory)
    with _failures(directory), _all_or_nothing(directory):
        write_beside(directory / WEIGHTS, weights_chunks(served.state))
        write_beside(directory / MARK, [mark.model_dump_json().encode()])
        replace_durably(directory / JOURNAL, *pack_overwrites(Overwrites(), mark.model_dump()))
    return Staged(mark, None, dict(served.digests))


def pull(reader: VersionReader, directory: str | Path, version: int) -> tuple[LocalCopy, Manifest, str | None]:
    """Bring the copy in `directory` to `version`, from what is there or from nothing.

    Returns the copy, the version's manifest, and why an unusable copy was thrown away, if one was. Raises BoardError
    when the version is not on the board or the copy is newer, IntegrityError when the board is damaged, SprawlError
    when the directory cannot be written or somebody else uses it.
    """
    manifest = reader.require(version)
    with hold(directory):
        copy, discarded = _pull(reader, Path(directory), manifest)
    return copy, manifest, discarded


def _pull(reader: VersionReader, directory: Path, manifest: Manifest) -> tuple[LocalCopy, str | None]:
    version, discarded = manifest.version, None
    try:
        copy = LocalCopy.open(directory)
    except IntegrityError as error:
        copy, discarded = None, error.message
    if copy is not None and copy.run_id != reader.run_id:
        raise BoardError(f"{directory} holds a version of run {copy.run_id!r}", "choose another directory")
    if copy is None:
        return LocalCopy.create(directory, reader.run_id, reader.materialise(version)), discarded
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
    return copy, discarded


def verify(directory: str | Path) -> None:
    """Hash the weights, for whoever is about to read them. May run beside the process that steps the copy.

    Raises IntegrityError when they are not what sprawl.json says and no step is under way.
    """
    directory = Path(directory)
    with _failures(directory):
        mark = _read_mark(directory / MARK)
        if (directory / JOURNAL).exists() or mark is None:
            return
        root = root_digest(tensor_digests(map_weights(directory / WEIGHTS)[0]))
        stepping = (directory / JOURNAL).exists() or _read_mark(directory / MARK) != mark
    if root != mark.root_digest and not stepping:
        raise _damaged(directory, mark, root)


def is_reserved(name: str) -> bool:
    """Whether a file of this name belongs to the copy itself."""
    return name in (MARK, JOURNAL) or ".safetensors" in name or name.startswith(".")


def _damaged(directory: Path, said: Mark, root: str) -> IntegrityError:
    return IntegrityError(
        f"{directory / WEIGHTS} is damaged: it should be version {said.version} of run {said.run_id!r} "
        f"with root digest {said.root_digest}, it has {root}",
        "delete the directory and fetch it again",
    )


def _in_place(state: State, overwrites: Overwrites) -> bool:
    """Whether no tensor comes, goes or changes its form."""
    same = (
        name in state and state[name].dtype == tensor.dtype and state[name].shape == tensor.shape
        for name, tensor in overwrites.whole.items()
    )
    return all(same) and not any(name in state for name in overwrites.removed)


def _bounded(state: State, overwrites: Overwrites) -> Overwrites:
    """The same writes, in no more bytes than `state` has: a patch of most of a tensor is larger than the tensor."""
    patches, whole = dict(overwrites.patches), dict(overwrites.whole)
    for name, patch in overwrites.patches.items():
        if patch.indices.nbytes + patch.values.nbytes > state_bytes({name: state[name]}):
            result = {name: state[name].clone()}
            apply(result, Overwrites({name: patches.pop(name)}))
            whole |= result
    return replace(overwrites, patches=patches, whole=whole)


def _finish_exchange(directory: Path, leads_to: Mark) -> None:
    """A whole new file is complete once its journal is there: one that is what the journal says takes its place."""
    waiting = beside(directory / WEIGHTS)
    if waiting.exists() and root_digest(tensor_digests(map_weights(waiting)[0])) == leads_to.root_digest:
        exchange(directory / WEIGHTS)


def _refuse_foreign(directory: Path) -> None:
    known = (directory / MARK).exists() or (directory / JOURNAL).exists()
    others = [file.name for file in directory.glob("[!.]*.safetensors*") if file.name != WEIGHTS or not known]
    if others:
        raise SprawlError(f"{directory} already holds {others[0]}", "choose an empty directory")


def _clean(directory: Path) -> None:
    """Delete the journal and what was never exchanged."""
    left = [path for name in (WEIGHTS, MARK, JOURNAL) if (path := beside(directory / name)).exists()]
    left += [path for path in (directory / JOURNAL,) if path.exists()]
    for path in left:
        path.unlink()
    if left:
        sync_directory(directory)


@contextmanager
def _all_or_nothing(directory: Path) -> Iterator[None]:
    """What could not be staged completely gives its room on the disk back."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            _clean(directory)
        raise


@contextmanager
def _failures(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            fix = "free some room there: a checkpoint needs up to twice its size"
            raise SprawlError(f"cannot write {directory}: {error.strerror}", fix) from None
        raise file_failure("write", directory, error) from None


def _read_mark(path: Path) -> Mark | None:
    try:
        return Mark.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        raise IntegrityError(f"{path} is not readable: {error}", "delete the directory and fetch it again") from None


def _read_journal(path: Path) -> tuple[Overwrites, Mark] | None:
    try:
        overwrites, note = unpack_overwrites(path.read_bytes(), str(path))
        return overwrites, Mark.model_validate(note)
    except (FileNotFoundError, NotADirectoryError, IntegrityError, ValidationError):
        return None
