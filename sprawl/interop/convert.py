"""Between the slime/miles/stitch disk layout and a board, both ways, version by version; both may be called again to
catch up, and killed at any moment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import sprawl
from sprawl.board import keys
from sprawl.board.commit import CommitOptions
from sprawl.board.ledger import Ledger
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader, nothing_published
from sprawl.board.records import RunRecord
from sprawl.board.signing import Signer
from sprawl.board.store import Store
from sprawl.delta.codec import Overwrites, apply
from sprawl.delta.compose import inverse, restrict
from sprawl.delta.files import load_state
from sprawl.delta.state import State, dtype_name, raw_bytes
from sprawl.errors import BoardError, IntegrityError
from sprawl.interop.layout import Encoding
from sprawl.interop.reading import LayoutReader
from sprawl.interop.writing import LayoutWriter

Progress = Callable[[int, int], None]
"""Called with (version, bytes of it in the target)."""


@dataclass(frozen=True)
class Converted:
    """Versions that were written by this call, and what they hold in the target."""

    run_id: str
    versions: list[int]
    bytes: int


def import_layout(
    source: Store,
    board: Store,
    *,
    run_id: str | None = None,
    base: Path | None = None,
    keyframe_every: int = 20,
    signer: Signer | None = None,
    progress: Progress = lambda version, size: None,
) -> Converted:
    """Publish the versions of a disk layout on a board, under their own numbers.

    `base` is the checkpoint that the first delta stands on, when the layout does not hold it (the trainer's boot
    checkpoint). Continues after the versions that are on the board already. Raises BoardError when the chain does not
    meet them or a base is missing, IntegrityError naming version and tensor when something is damaged or a number was
    used for another state.
    """
    layout = LayoutReader(source)
    chain = layout.chain()
    name = run_id or chain.run_id
    if name is None:
        raise BoardError(f"{source.url} does not name its run", "give the run id under which to import it")
    reader = VersionReader(board, name)
    head = reader.head()
    if head is not None and "imported_from" not in reader.require(head).extra:
        raise BoardError(f"run {name!r} on board {board.url} is not an import", "choose another --run-id")
    first = chain.indices[0]
    if head is not None:
        at, state, files = head, reader.materialise(head).state, reader.files()
    elif chain.anchor is None:
        at, state, files = first.version, layout.apply({}, None, first), layout.files(first.version)
    elif base is None:
        raise BoardError(
            f"version {first.version} of {source.url} is a delta against version {chain.anchor}, which is not there",
            "give the checkpoint that the trainer started from as the base",
        )
    else:
        at, state, files = chain.anchor, load_state(base), _config_files(base)
    options = CommitOptions(
        keyframe_every=keyframe_every,
        dtype=_dtype(state),
        writer="import",
        files=files,
        signer=signer,
        origin=min(reader.versions(), default=at),
    )
    publisher = Publisher(board, name, options)
    done = _Done(name, progress)

    def publish(version: int, state: State) -> None:
        receipt = publisher.publish(version, version, state, extra={"imported_from": source.url})
        if not receipt.already_committed:
            done.add(version, receipt.sent_bytes)

    publish(at, state)
    if chain.indices[-1].version < at:
        raise IntegrityError(
            f"{source.url} is at version {chain.indices[-1].version}, board {board.url} has version {at} of it already",
            "the trainer counts its versions again: import it under another run id",
        )
    for index in chain.indices:
        if head is not None and index.version == head:
            layout.check_same(state, index)
        if index.version <= at:
            continue
        if index.version != at + 1:
            raise BoardError(f"{source.url} has no version {at + 1}: after {at} comes {index.version}")
        state = layout.apply(state, at, index)
        at = index.version
        publish(at, state)
    _register(reader, source.url, state)
    return done.result()


def export_run(
    reader: VersionReader,
    target: Store,
    *,
    encoding: Encoding = "xor",
    checksum: str = "xxh3-128",
    first: int | None = None,
    last: int | None = None,
    full_every: int | None = None,
    folder: str | None = None,
    progress: Progress = lambda version, size: None,
) -> Converted:
    """Write versions `first` to `last` (default: all there are) of a run as a disk layout.

    The first one is full, then every `full_every`th, and those whose tensors change names, shapes or dtypes; the others
    are deltas. Continues after the version that the target's `latest` names. Raises BoardError when versions are
    missing, IntegrityError when the board is damaged.
    """
    versions = reader.versions()
    if not versions:
        raise nothing_published(reader.run_id, reader.store.url)
    first = versions[0] if first is None else first
    last = versions[-1] if last is None else last
    if first > last:
        raise BoardError(f"cannot export from version {first} to {last}", "give the older version first")
    for version in (first, last):
        reader.require(version)  # before anything is written
    writer = LayoutWriter(target, reader.run_id, encoding=encoding, checksum=checksum, folder=folder)
    head = writer.head()
    if head is not None and head >= last:
        return Converted(reader.run_id, [], 0)
    files = reader.files()
    done = _Done(reader.run_id, progress)
    served = reader.materialise(first if head is None else head)
    if head is None:
        done.add(first, writer.full(first, served.state, files))
    while served.version < last:
        prepared = reader.prepare(served, served.version + 1)
        back = inverse(served.state, prepared.overwrites)
        reader.commit(served, prepared)
        changes_form = bool(back.removed) or any(
            name not in served.state
            or served.state[name].dtype != tensor.dtype
            or served.state[name].shape != tensor.shape
            for name, tensor in back.whole.items()
        )
        version = served.version
        if changes_form or (full_every is not None and (version - first) % full_every == 0):
            done.add(version, writer.full(version, served.state, files))
        else:
            done.add(version, writer.delta(version, version - 1, _Before(served.state, back), served.state))
    return done.result()


class _Before(Mapping[str, np.ndarray]):
    """Bytes, before the last step, of the tensors it changed: restored one at a time when asked for."""

    def __init__(self, state: State, back: Overwrites) -> None:
        self._state = state
        self._back = back
        self._names = back.changed

    def __getitem__(self, name: str) -> np.ndarray:
        scratch = {name: self._state[name].clone()}
        apply(scratch, restrict(self._back, {name}))
        return raw_bytes(scratch[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Done:
    """Counts what a conversion wrote, and tells."""

    def __init__(self, run_id: str, progress: Progress) -> None:
        self._run_id = run_id
        self._progress = progress
        self._versions: list[int] = []
        self._bytes = 0

    def add(self, version: int, size: int) -> None:
        self._versions.append(version)
        self._bytes += size
        self._progress(version, size)

    def result(self) -> Converted:
        return Converted(self._run_id, self._versions, self._bytes)


def _config_files(base: Path) -> dict[str, bytes]:
    folder = base if base.is_dir() else base.parent
    names = [file for file in sorted(folder.iterdir()) if file.suffix in (".json", ".txt", ".jinja", ".model")]
    return {file.name: file.read_bytes() for file in names if ".safetensors" not in file.name}


def _dtype(state: State) -> str:
    """The dtype of most floating-point elements."""
    counts: Counter[str] = Counter()
    for tensor in state.values():
        if tensor.is_floating_point():
            counts[dtype_name(tensor.dtype)] += tensor.numel()
    return counts.most_common(1)[0][0] if counts else "mixed"


def _register(reader: VersionReader, url: str, state: State) -> None:
    """Make the run known to `sprawl board ls`, unless it is."""
    if reader.store.exists(keys.run(reader.run_id)):
        return
    record = RunRecord(
        run_id=reader.run_id,
        created_at=time.time(),
        config={"imported_from": url},
        base_digest=reader.require(reader.versions()[0]).root_digest,
        parameters=sum(tensor.numel() for tensor in state.values()),
        sprawl_version=sprawl.__version__,
    )
    Ledger(reader.store, reader.run_id).create_run(record)
