"""Master weights and optimizer state on the board: blobs first, then the commit record (invariant 2).

A checkpoint is `masters`, `optimizer` and, when the boundary codec carries something from step to step, `codec`: apart,
so that the anchor reads the masters without the moments. A trainer that is one process writes one blob of each. Of a
pipeline every stage writes its own (`masters-2of8`) and one process commits; who reads gets all of them as one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from blake3 import blake3
from safetensors.torch import load, save
from torch import Tensor

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.records import CheckpointRecord
from sprawl.board.store import MissingKey, Store
from sprawl.errors import BoardError, IntegrityError
from sprawl.policy import Decoder
from sprawl.policy.stage import StagePlace, load_stage, owned_names
from sprawl.train.codecs.base import BoundaryCodec
from sprawl.train.optimizer import RunOptimizer, load_optimizer_tensors, optimizer_tensors

_SHARD = re.compile(r"(masters|optimizer|codec)(-(\d+)of(\d+))?")


@dataclass(frozen=True)
class Shard:
    """Blobs that one process wrote: name -> blake3, and their size. They are named by their digests: a writer that was
    taken for dead and goes on cannot replace what its successor has committed."""

    blobs: dict[str, str]
    bytes: int


def write_shard(
    store: Store,
    run_id: str,
    step: int,
    decoder: Decoder,
    optimizer: RunOptimizer,
    codec: BoundaryCodec | None = None,
    place: StagePlace | None = None,
) -> Shard:
    """Write what this process holds; nothing is committed. `place`: its stage, None for the whole model."""
    names = {name for name, _ in decoder.named_parameters()} if place is None else set(owned_names(decoder, place))
    parts = {
        "masters": {name: p.detach() for name, p in decoder.named_parameters() if name in names},
        "optimizer": {
            key: tensor
            for key, tensor in optimizer_tensors(decoder, optimizer).items()
            if key.partition(":")[2] in names
        },
    }
    if codec is not None and (carried := codec.state()):
        parts["codec"] = carried
    ending = "" if place is None else f"-{place.index}of{place.count}"
    digests, size = {}, 0
    for name, tensors in parts.items():
        data = save({key: tensor.contiguous() for key, tensor in tensors.items()})
        digests[name + ending] = digest = blake3(data).hexdigest()
        store.put(keys.checkpoint_blob(run_id, step, name + ending, digest), data)
        size += len(data)
    return Shard(digests, size)


def commit_checkpoint(ledger: Ledger, step: int, epoch: int, shards: Sequence[Shard]) -> int:
    """The record that makes the blobs of all processes a checkpoint. Returns its size in bytes."""
    blobs = {name: digest for shard in shards for name, digest in shard.blobs.items()}
    size = sum(shard.bytes for shard in shards)
    ledger.write_checkpoint(CheckpointRecord(step=step, epoch=epoch, blobs=blobs, bytes=size, created_at=time.time()))
    return size


def save_checkpoint(
    store: Store,
    ledger: Ledger,
    step: int,
    epoch: int,
    decoder: Decoder,
    optimizer: RunOptimizer,
    codec: BoundaryCodec | None = None,
) -> int:
    """Write the checkpoint of `step` by one process, unless it is already committed. Returns its size in bytes."""
    if ledger.checkpoint(step) is not None:
        return 0
    return commit_checkpoint(ledger, step, epoch, [write_shard(store, ledger.run_id, step, decoder, optimizer, codec)])


def read_blob(store: Store, ledger: Ledger, step: int, name: str) -> dict[str, Tensor]:
    """`masters`, `optimizer` or `codec` of a committed checkpoint, whole, digests checked.

    Raises BoardError when the checkpoint is not there and IntegrityError when its bytes are not the committed ones.
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
    record = ledger.checkpoint(step)
    if record is None:
        raise BoardError(f"run {ledger.run_id} has no checkpoint of step {step}")
    shards = [name for name in record.blobs if (match := _SHARD.fullmatch(name)) and match[1] == kind]
    if not shards:
        raise IntegrityError(f"checkpoint {step} of run {ledger.run_id} has no {kind}")
    if place is not None:
        mine = f"{kind}-{place.index}of{place.count}"
        shards.sort(key=lambda name: name != mine)
    tensors: dict[str, Tensor] = {}
    for name in shards:
        data = _get_blob(store, ledger.run_id, step, name, record.blobs[name])
        digest = blake3(data).hexdigest()
        if digest != record.blobs[name]:
            raise IntegrityError(f"checkpoint {step}/{name}: digest {digest[:16]}, committed {record.blobs[name][:16]}")
        tensors.update(load(data))
        if enough(tensors):
            break
    return tensors


def _get_blob(store: Store, run_id: str, step: int, name: str, digest: str) -> bytes:
    """Raises MissingKey. Checkpoints of older releases are found under the bare name."""
    try:
        return store.get(keys.checkpoint_blob(run_id, step, name, digest))
    except MissingKey:
        return store.get(keys.checkpoint_blob(run_id, step, name))


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


def surplus(checkpoints: list[int], keep: int, anchor_needs_from: int | None) -> list[int]:
    """Checkpoints that nobody needs any more: not among the newest `keep`, and older than what the anchor's next
    fire reads (None: no anchor)."""
    old = sorted(checkpoints)[:-keep]
    return [step for step in old if anchor_needs_from is None or step < anchor_needs_from]


def delete_checkpoint(store: Store, run_id: str, step: int) -> None:
    """The record goes first: a reader never sees a committed checkpoint without its blobs. What a writer that was
    killed before its record had put there goes too."""
    store.delete(keys.checkpoint(run_id, step))
    for key in store.list(keys.checkpoint_blobs(run_id, step)):
        store.delete(key)
