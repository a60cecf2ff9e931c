"""Master weights and optimizer state on the board: blobs first, then the commit record (invariant 2).

Two blobs a checkpoint, so that the anchor reads the masters without the moments: `masters` and `optimizer`; a third,
`codec`, when the boundary codec carries something from step to step.
"""

from __future__ import annotations

import time

import torch
from blake3 import blake3
from safetensors.torch import load, save
from torch import Tensor

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.records import CheckpointRecord
from sprawl.board.store import Store
from sprawl.errors import BoardError, IntegrityError
from sprawl.policy import Decoder
from sprawl.train.codecs.base import BoundaryCodec
from sprawl.train.optimizer import RunOptimizer, load_optimizer_tensors, optimizer_tensors

BLOBS = ("masters", "optimizer", "codec")


def save_checkpoint(
    store: Store,
    ledger: Ledger,
    step: int,
    epoch: int,
    decoder: Decoder,
    optimizer: RunOptimizer,
    codec: BoundaryCodec | None = None,
) -> int:
    """Write the checkpoint of `step` unless it is already committed. Returns its size in bytes."""
    if ledger.checkpoint(step) is not None:
        return 0
    parts = {
        "masters": {name: parameter.detach() for name, parameter in decoder.named_parameters()},
        "optimizer": optimizer_tensors(decoder, optimizer),
    }
    if codec is not None and (carried := codec.state()):
        parts["codec"] = carried
    digests, size = {}, 0
    for name, tensors in parts.items():
        data = save({key: tensor.contiguous() for key, tensor in tensors.items()})
        store.put(keys.checkpoint_blob(ledger.run_id, step, name), data)
        digests[name] = blake3(data).hexdigest()
        size += len(data)
    ledger.write_checkpoint(CheckpointRecord(step=step, epoch=epoch, blobs=digests, bytes=size, created_at=time.time()))
    return size


def read_blob(store: Store, ledger: Ledger, step: int, name: str) -> dict[str, Tensor]:
    """One blob of a committed checkpoint, digest checked. Raises BoardError when the checkpoint is not there and
    IntegrityError when its bytes are not the committed ones."""
    record = ledger.checkpoint(step)
    if record is None:
        raise BoardError(f"run {ledger.run_id} has no checkpoint of step {step}")
    data = store.get(keys.checkpoint_blob(ledger.run_id, step, name))
    digest = blake3(data).hexdigest()
    if digest != record.blobs[name]:
        raise IntegrityError(f"checkpoint {step}/{name}: digest {digest[:16]}, committed {record.blobs[name][:16]}")
    return load(data)


def restore(
    store: Store,
    ledger: Ledger,
    step: int,
    decoder: Decoder,
    optimizer: RunOptimizer,
    codec: BoundaryCodec | None = None,
) -> None:
    """Load masters, optimizer state and codec state of a committed checkpoint."""
    record = ledger.checkpoint(step)
    if codec is not None and record is not None:
        codec.load_state(read_blob(store, ledger, step, "codec") if "codec" in record.blobs else {})
    decoder.load_served(read_blob(store, ledger, step, "masters"), torch.float32)
    load_optimizer_tensors(decoder, optimizer, read_blob(store, ledger, step, "optimizer"))


def surplus(checkpoints: list[int], keep: int, anchor_needs_from: int | None) -> list[int]:
    """Checkpoints that nobody needs any more: not among the newest `keep`, and older than what the anchor's next
    fire reads (None: no anchor)."""
    old = sorted(checkpoints)[:-keep]
    return [step for step in old if anchor_needs_from is None or step < anchor_needs_from]


def delete_checkpoint(store: Store, run_id: str, step: int) -> None:
    """The record goes first: a reader never sees a committed checkpoint without its blobs."""
    store.delete(keys.checkpoint(run_id, step))
    for name in BLOBS:
        store.delete(keys.checkpoint_blob(run_id, step, name))
