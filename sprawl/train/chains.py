"""Reading and writing the masters of checkpoints on a board, where some are deltas against others.

The chain of a blob are the blobs of the same name from a whole one on. What a commit record says of a blob
(`MastersBlob`) names its base and the root digest of what comes out, so a chain is checked link by link and at its end.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from blake3 import blake3
from torch import Tensor

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.records import CheckpointRecord, MastersBlob
from sprawl.board.store import MissingKey, Store
from sprawl.delta.codec import decode_whole, encode_whole
from sprawl.delta.state import State, clone_state, root_digest, tensor_digests
from sprawl.errors import BoardError, IntegrityError, SprawlError
from sprawl.policy.stage import StagePlace
from sprawl.train.masters import DeltaPlan, apply_masters, encode_masters

log = logging.getLogger(__name__)

_SHARD = re.compile(r"(masters|optimizer|codec)(-(\d+)of(\d+))?")


def shard_name(kind: str, place: StagePlace | None) -> str:
    """Name of the blob of one kind that a process writes; `place`: its stage, None for the whole model."""
    return kind if place is None else f"{kind}-{place.index}of{place.count}"


def shards(record: CheckpointRecord, run_id: str, kind: str, place: StagePlace | None) -> list[str]:
    """Names of the blobs of one kind, that of the same stage first. Raises IntegrityError when there is none."""
    found = [name for name in record.blobs if (match := _SHARD.fullmatch(name)) and match[1] == kind]
    if not found:
        raise IntegrityError(f"checkpoint {record.step} of run {run_id} has no {kind}")
    return sorted(found, key=lambda name: name != shard_name(kind, place))


def read_record(ledger: Ledger, step: int) -> CheckpointRecord:
    """Raises BoardError when the checkpoint is not there."""
    record = ledger.checkpoint(step)
    if record is None:
        raise BoardError(f"run {ledger.run_id} has no checkpoint of step {step}")
    return record


def fetch_blob(store: Store, run_id: str, record: CheckpointRecord, name: str) -> bytes:
    """A blob of a checkpoint; those of older releases are found under their bare name.

    Raises MissingKey, and IntegrityError when its bytes are not the committed ones.
    """
    committed = record.blobs[name]
    try:
        data = store.get(keys.checkpoint_blob(run_id, record.step, name, committed))
    except MissingKey:
        data = store.get(keys.checkpoint_blob(run_id, record.step, name))
    digest = blake3(data).hexdigest()
    if digest != committed:
        raise IntegrityError(f"checkpoint {record.step}/{name}: digest {digest[:16]}, committed {committed[:16]}")
    return data


class MastersReader:
    """Reads masters through their chains. What it was told to hold it does not read again, and starts chains from.

    States that it returns share memory with what it holds and are not to be changed.
    """

    def __init__(self, store: Store, ledger: Ledger) -> None:
        self._store, self._ledger = store, ledger
        self._held: dict[int, dict[str, State]] = {}  # step -> blob name -> its tensors
        self.bytes_read = 0

    @property
    def held(self) -> list[int]:
        """Steps of the checkpoints in memory, ascending."""
        return sorted(self._held)

    def hold(self, steps: Collection[int]) -> None:
        """Forget all checkpoints in memory but these."""
        self._held = {step: found for step, found in self._held.items() if step in steps}

    def read(self, step: int) -> State:
        """All masters of a committed checkpoint, which is then held.

        Raises BoardError when the checkpoint is not there and IntegrityError when its bytes are not the committed ones
        or a checkpoint that it is a delta against is gone.
        """
        if step not in self._held:
            record = read_record(self._ledger, step)
            names = shards(record, self._ledger.run_id, "masters", None)
            self._held[step] = {name: self.read_blob(record, name) for name in names}
        return {name: tensor for found in self._held[step].values() for name, tensor in found.items()}

    def read_blob(self, record: CheckpointRecord, name: str) -> State:
        """The tensors of one blob of masters, in memory of their own. Raises as `read`."""
        links, state = self._chain(record, name)
        if state is None:
            state = decode_whole(self._fetch(links.pop(0), name), f"checkpoint {record.step}/{name}")
        for link in links:
            apply_masters(state, self._fetch(link, name), f"checkpoint {link.step}/{name}")
        about = record.masters.get(name)
        if links and about is not None and root_digest(tensor_digests(state)) != about.root:
            raise IntegrityError(
                f"checkpoint {record.step}/{name}: its chain from checkpoint {links[0].step} on does not end in the "
                f"committed masters {about.root[:16]}"
            )
        return state

    def _chain(self, record: CheckpointRecord, name: str) -> tuple[list[CheckpointRecord], State | None]:
        """The blob's record and those before it, oldest first; and what the first is a delta against, None where it
        is whole."""
        links = [record]
        while (about := links[0].masters.get(name)) is not None and about.base is not None:
            if name in self._held.get(about.base, {}):
                return links, clone_state(self._held[about.base][name])
            base = self._ledger.checkpoint(about.base)
            if base is None or name not in base.blobs:
                raise self._lost(links[0].step, about.base, name)
            links.insert(0, base)
        return links, None

    def _fetch(self, record: CheckpointRecord, name: str) -> bytes:
        try:
            data = fetch_blob(self._store, self._ledger.run_id, record, name)
        except MissingKey:
            raise self._lost(record.step, record.step, name) from None
        self.bytes_read += len(data)
        return data

    def _lost(self, step: int, gone: int, name: str) -> IntegrityError:
        what = f"checkpoint {step}/{name} of run {self._ledger.run_id}"
        how = "its bytes are gone" if gone == step else f"it is a delta against checkpoint {gone}, which is gone"
        return IntegrityError(
            f"{what} cannot be read: {how}", "restore that object, or use a checkpoint with a whole chain"
        )


@dataclass(frozen=True)
class Written:
    """A blob of masters to be stored, and what the commit record says of it."""

    data: bytes
    about: MastersBlob


class MastersWriter:
    """Encodes the masters that one process holds, checkpoint after checkpoint. Keeps a copy of the newest hub's (four
    bytes a parameter); after a restart that is read from the board once."""

    def __init__(
        self, store: Store, ledger: Ledger, plan: DeltaPlan, place: StagePlace | None = None, threads: int = 1
    ):
        self._store, self._ledger, self._plan, self._threads = store, ledger, plan, threads
        self._name = shard_name("masters", place)
        self._hub: tuple[int, str, State] | None = None  # step, root digest, masters

    def encode(self, step: int, masters: Mapping[str, Tensor]) -> Written:
        """The blob for the checkpoint of `step`. `masters` are not modified and no memory of theirs is kept."""
        masters = {name: tensor.detach().cpu().contiguous() for name, tensor in masters.items()}
        whole_bytes = sum(tensor.nbytes for tensor in masters.values())
        root = root_digest(tensor_digests(masters))
        base = self._plan.base(step)
        old = None if base is None else self._base(base)
        data = None
        if old is not None:
            try:
                data = encode_masters(old, masters, self._threads)
            except ValueError as error:
                log.warning("checkpoint %d of %s is written whole: %s", step, self._ledger.run_id, error)
        if self._plan.is_hub(step):
            self._hub = (step, root, clone_state(masters))
        if data is None:
            return Written(encode_whole(masters), MastersBlob(root=root, base=None, whole_bytes=whole_bytes))
        return Written(data, MastersBlob(root=root, base=base, whole_bytes=whole_bytes))

    def _base(self, step: int) -> State | None:
        """The masters of this process at a hub as they are on the board, or None if they are not to be had."""
        record = self._ledger.checkpoint(step)
        about = None if record is None else record.masters.get(self._name)
        if record is None or about is None:
            return None
        if self._hub is None or self._hub[:2] != (step, about.root):
            try:
                self._hub = (step, about.root, MastersReader(self._store, self._ledger).read_blob(record, self._name))
            except SprawlError as error:
                log.warning("the next checkpoint of %s is written whole: %s", self._ledger.run_id, error)
                return None
        return self._hub[2]
