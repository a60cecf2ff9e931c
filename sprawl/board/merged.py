"""Merged deltas: k steps of a chain as one, for whoever joins late or was away.

A merged delta is an addition beside the chain, made off the trainer's path by anyone who may write to the board
(`sprawl board merge`). It names the root digests at both ends, so it can only be used between the very states it was
made for, and a reader that finds it lost or damaged takes another way.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from blake3 import blake3
from pydantic import Field, ValidationError

from sprawl.board import keys
from sprawl.board.manifest import DELTA, BlobEntry
from sprawl.board.records import Record
from sprawl.board.signing import Signature, Signer
from sprawl.board.store import MissingKey
from sprawl.delta.codec import Overwrites, apply, encode
from sprawl.delta.compose import compose, inverse, restrict
from sprawl.delta.state import State, clone_state
from sprawl.errors import BoardError, IntegrityError

if TYPE_CHECKING:
    from sprawl.board.reader import VersionReader

_BATCH_BYTES = 256 << 20  # of tensors that are encoded together, held twice while they are


class MergedRecord(Record):
    """merged/<base>-<version>.json: commit record of a merged delta, created exclusively after its blobs."""

    run_id: str
    base_version: int
    version: int
    base_root_digest: str
    root_digest: str
    removed: list[str] = Field(default_factory=list, description="Tensors of the base that are gone.")
    blobs: list[BlobEntry]
    bytes: int = Field(description="Of all blobs.")
    chain_bytes: int = Field(description="Of the deltas that it stands for.")
    nonce: str
    created_at: float = Field(description="Unix seconds.")
    signature: Signature | None = None


def read_merged(reader: VersionReader, base: int, version: int) -> MergedRecord | None:
    """The record of a merged delta, None when there is none.

    Raises IntegrityError when it is damaged, of another place, or not signed by a key the reader trusts.
    """
    key = keys.merged(reader.run_id, base, version)
    try:
        data = reader.store.get(key)
    except MissingKey:
        return None
    try:
        record = MergedRecord.model_validate_json(data)
    except ValidationError as error:
        raise IntegrityError(f"{key} is not the record of a merged delta: {error.errors()[0]['msg']}") from None
    if (record.run_id, record.base_version, record.version) != (reader.run_id, base, version):
        raise IntegrityError(f"{key} is the record of {record.base_version}-{record.version} of run {record.run_id!r}")
    if reader.trust is not None:
        reader.trust.check(json.loads(data), key)
    return record


def merge(reader: VersionReader, base: int, version: int, signer: Signer | None = None) -> MergedRecord:
    """Compose the chain from `base` to `version` and put the result on the board, unless it is there.

    Holds one state: it is taken along the chain while the steps back are composed, and what `base` was is restored
    tensor by tensor. Raises BoardError when a version of the chain is not on the board, IntegrityError when one is
    damaged.
    """
    if not 0 <= base < version:
        raise BoardError(f"cannot merge from version {base} to {version}", "give two versions, the older one first")
    held = read_merged(reader, base, version)
    if held is not None:
        return held
    start, end = reader.require(base), reader.require(version)
    served = reader.materialise(base)
    back = Overwrites()
    chain_bytes = 0
    while served.version < version:
        prepared = reader.prepare(served, served.version + 1)
        chain_bytes += prepared.bytes
        back = compose([inverse(served.state, prepared.overwrites), back])
        reader.commit(served, prepared)
    blobs = []
    for blob in _encode(served.state, back):
        digest = blake3(blob).hexdigest()
        reader.store.put(keys.merged_blob(reader.run_id, base, version, digest), blob)
        blobs.append(BlobEntry(digest=digest, size=len(blob), role=DELTA))
    record = MergedRecord(
        run_id=reader.run_id,
        base_version=base,
        version=version,
        base_root_digest=start.root_digest,
        root_digest=end.root_digest,
        removed=sorted(name for name in back.whole if name not in served.state),
        blobs=blobs,
        bytes=sum(blob.size for blob in blobs),
        chain_bytes=chain_bytes,
        nonce=secrets.token_hex(16),
        created_at=time.time(),
    )
    if signer is not None:
        signature = signer.sign(record.model_dump(mode="json", exclude_none=True))
        record = record.model_copy(update={"signature": signature})
    data = record.model_dump_json(exclude_none=True).encode()
    if reader.store.create(keys.merged(reader.run_id, base, version), data):
        return record
    held = read_merged(reader, base, version)
    if held is None:
        raise BoardError(f"the merged delta {base}-{version} vanished while it was written")
    return held


def _encode(state: State, back: Overwrites) -> Iterator[bytes]:
    """Deltas to `state` from what `back` makes of it, a bounded batch of tensors at a time."""
    for names in _batches(state, [name for name in sorted({*back.changed, *back.removed}) if name in state]):
        new = {name: state[name] for name in names}
        old = clone_state(new)
        apply(old, restrict(back, set(names)))
        yield encode(old, new).blob


def _batches(state: State, names: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name in names:
        need = state[name].numel() * state[name].element_size()
        if batch and size + need > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += need
    if batch:
        yield batch
