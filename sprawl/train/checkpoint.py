"""Master weights and optimizer state on the board: blobs first, then the commit record (invariant 2).

A checkpoint is `masters`, `optimizer` and, when the boundary codec carries something from step to step, `codec`: apart,
so that the anchor reads the masters without the moments. A trainer that is one process writes one blob of each. Of a
pipeline every stage writes its own (`masters-2of8`) and one process commits; who reads gets all of them as one.

Masters may be deltas against those of an earlier checkpoint (`sprawl/train/masters.py` says which, `chains.py` reads
them); a blob's chain consists of blobs of the same name, so every process encodes and reads its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import load, save
from torch import Tensor

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.records import CheckpointRecord, MastersBlob
from sprawl.board.store import Store
from sprawl.policy import Decoder
from sprawl.policy.stage import StagePlace, load_stage, owned_names
from sprawl.train.chains import MastersReader, MastersWriter, fetch_blob, read_record, shard_name, shards
from sprawl.train.codecs.base import BoundaryCodec
from sprawl.train.optimizer import RunOptimizer, load_optimizer_tensors, optimizer_tensors


@dataclass(frozen=True)
class Shard:
    """Blobs that one process wrote: name -> blake3, their size, and what those of masters are. On the board they are
    named by their digests: a writer that was taken for dead and goes on cannot replace what its successor committed."""

    blobs: dict[str, str]
    bytes: int
    masters: dict[str, MastersBlob] = field(default_factory=dict)

    def to_message(self) -> dict[str, Any]:
        """JSON-able, for the process that commits."""
        masters = {name: about.model_dump() for name, about in self.masters.items()}
        return {"blobs": self.blobs, "bytes": self.bytes, "masters": masters}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Shard:
        masters = {name: MastersBlob.model_validate(about) for name, about in message["masters"].items()}
        return cls(message["blobs"], message["bytes"], masters)


def write_shard(
    store: Store,
    run_id: str,
    step: int,
    decoder: Decoder,
    optimizer: RunOptimizer,
    codec: BoundaryCodec | None = None,
    place: StagePlace | None = None,
    writer: MastersWriter | None = None,
) -> Shard:
    """Write what this process holds; nothing is committed. `place`: its stage, None for the whole model. `writer`
    writes the masters as deltas where its plan says so, without one they are whole."""
    names = {name for name, _ in decoder.named_parameters()} if place is None else set(owned_names(decoder, place))
    masters = {name: p.detach() for name, p in decoder.named_parameters() if name in names}
    digests, size = {}, 0

    def put(kind: str, data: bytes) -> None:
        nonlocal size
        name = shard_name(kind, place)
        digests[name] = digest = blake3(data).hexdigest()
        store.put(keys.checkpoint_blob(run_id, step, name, digest), data)
        size += len(data)

    about: dict[str, MastersBlob] = {}
    if writer is None:
        put("masters", save({name: tensor.contiguous() for name, tensor in masters.items()}))
    else:
        written = writer.encode(step, masters)
        about[shard_name("masters", place)] = written.about
        put("masters", written.data)
        del written
    state = optimizer_tensors(decoder, optimizer).items()
    put("optimizer", save({key: t.contiguous() for key, t in state if key.partition(":")[2] in names}))
    if codec is not None and (carried := codec.state()):
        put("codec", save({key: tensor.contiguous() for key, tensor in carried.items()}))
    return Shard(digests, size, about)


def commit_checkpoint(ledger: Ledger, step: int, epoch: int, written: Sequence[Shard]) -> int:
    """The record that makes the blobs of all processes a checkpoint. Returns its size in bytes."""
    size = sum(shard.bytes for shard in written)
    record = CheckpointRecord(
        step=step,
        epoch=epoch,
        blobs={name: digest for shard in written for name, digest in shard.blobs.items()},
        bytes=size,
        masters={name: about for shard in written for name, about in shard.masters.items()},
        created_at=time.time(),
    )
    ledger.write_checkpoint(record)
    return size


def save_checkpoint(
    store: Store,
    ledger: Ledger,
    step: int,
    epoch: int,
    decoder: Decoder,
    optimizer: RunOptimizer,
    codec: BoundaryCodec | None = None,
    writer: MastersWriter | None = None,
) -> int:
    """Write the checkpoint of `step` by one process, unless it is already committed. Returns its size in bytes."""
    if ledger.checkpoint(step) is not None:
        return 0
    shard = write_shard(store, ledger.run_id, step, decoder, optimizer, codec, writer=writer)
    return commit_checkpoint(ledger, step, epoch, [shard])


def read_blob(store: Store, ledger: Ledger, step: int, name: str) -> dict[str, Tensor]:
    """`masters`, `optimizer` or `codec` of a committed checkpoint, whole, digests checked.

    Raises BoardError when the checkpoint is not there and IntegrityError when its bytes are not the committed ones or
    what they are a delta against is gone.
    """
    return _read(store, ledger, step, name, lambda found: False)


def _read(
    store: Store,
    ledger: Ledger,
    step: int,
    kind: str,
    enough: Callable[[Mapping[str, Tensor]], bool],
    place: StagePlace | None = None,
) -> dict[str, Tensor]:
    """The tensors of one kind, shard by shard until there are `enough`; the shard of the same stage comes first."""
    record = read_record(ledger, step)
    reader = MastersReader(store, ledger)
    tensors: dict[str, Tensor] = {}
    for name in shards(record, ledger.run_id, kind, place):
        if kind == "masters":
            tensors.update(reader.read_blob(record, name))
        else:
            tensors.update(load(fetch_blob(store, ledger.run_id, record, name)))
        if enough(tensors):
            break
    return tensors


def restore(
    store: Store,
    ledger: Ledger,
    step: int,
    decoder: Decoder,
    optimizer: RunOptimizer,
    codec: BoundaryCodec | None = None,
    place: StagePlace | None = None,
) -> None:
    """Load masters, optimizer state and codec state of a committed checkpoint, however many processes wrote it.

    `place`: the stage that this process holds, None for the whole model.
    """
    record = ledger.checkpoint(step)
    if codec is not None and record is not None:
        carried: dict[str, Tensor] = {}
        if any(name.startswith("codec") for name in record.blobs):
            carried = _read(store, ledger, step, "codec", lambda found: False)
        if place is not None:
            carried = {name: tensor for name, tensor in carried.items() if codec.held_by(name, place.index)}
        codec.load_state(carried)
    names = {name for name, _ in decoder.named_parameters()}
    masters = _read(store, ledger, step, "masters", lambda found: names <= found.keys(), place)
    load_stage(decoder, masters, torch.float32) if place else decoder.load_served(masters, torch.float32)
    state = _read(store, ledger, step, "optimizer", lambda found: names <= _parameters(found), place)
    if place is not None:
        state = {key: tensor for key, tensor in state.items() if key.partition(":")[2] in names}
    load_optimizer_tensors(decoder, optimizer, state)


def _parameters(state: Collection[str]) -> set[str]:
    """Names of the parameters that optimizer state belongs to."""
    return {key.partition(":")[2] for key in state}


def surplus(
    checkpoints: Collection[int], keep: int, needed: Collection[int], bases: Callable[[int], Collection[int]]
) -> list[int]:
    """Checkpoints that nobody needs any more, in the order in which they may be deleted: what is a delta goes before
    what it is a delta against.

    Kept are the newest `keep`, those `needed`, and whatever their chains go through; `bases` says which checkpoints
    one is a delta against.
    """
    kept: set[int] = set()
    todo = {*sorted(checkpoints)[-keep:], *(set(needed) & set(checkpoints))}
    while todo:
        kept |= todo
        todo = {base for step in todo for base in bases(step)} - kept
    return sorted(set(checkpoints) - kept, reverse=True)


def bases_of(ledger: Ledger, step: int) -> set[int]:
    """The checkpoints that the one of `step` is a delta against; none when it is whole, or gone."""
    record = ledger.checkpoint(step)
    blobs = () if record is None else record.masters.values()
    return {about.base for about in blobs if about.base is not None}


def delete_checkpoint(store: Store, run_id: str, step: int) -> None:
    """The record goes first: a reader never sees a committed checkpoint without its blobs. What a writer that was
    killed before its record had put there goes too."""
    store.delete(keys.checkpoint(run_id, step))
    for key in store.list(keys.checkpoint_blobs(run_id, step)):
        store.delete(key)
