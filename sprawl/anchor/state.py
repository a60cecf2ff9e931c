"""The anchor's own memory on the board: M after every fire, named by what is in it.

The record of a fire, which is created exclusively, says which M is the run's. So of two anchors with other bits the one
that commits decides for both, and no writer can replace what another one has committed. Older states are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3
from safetensors.torch import load, save
from torch import Tensor

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.records import FireRecord
from sprawl.board.store import MissingKey, Store
from sprawl.errors import IntegrityError


def write_state(store: Store, run_id: str, step: int, momentum: Mapping[str, Tensor]) -> str:
    """Make M (fp32, by parameter) after the fire at `step` durable; returns its digest. Twice is harmless."""
    data = save(dict(momentum))
    digest = blake3(data).hexdigest()
    store.put(keys.anchor_state(run_id, step, digest), data)
    return digest


def read_state(store: Store, run_id: str, record: FireRecord) -> dict[str, Tensor]:
    """M after a committed fire. Raises IntegrityError when it is gone or not what the record names."""
    try:
        data = store.get(keys.anchor_state(run_id, record.step, record.state_digest))
    except MissingKey:
        raise IntegrityError(f"the anchor's state after fire {record.step} is gone from the board") from None
    if record.state_digest is not None and blake3(data).hexdigest() != record.state_digest:
        raise IntegrityError(
            f"the anchor's state after fire {record.step}: its bytes are not the committed ones "
            f"({record.state_digest[:16]})"
        )
    return load(data)


def forget_states(store: Store, ledger: Ledger, step: int, keep_from: int) -> None:
    """After the fire at `step` is committed: drop the states of fires before `keep_from`, and of those up to `step`
    what no record names (an anchor was killed before its commit, or lost it). Newer ones may be of a fire under way."""
    for key in store.list(keys.anchor_states(ledger.run_id)):
        name = key.removeprefix(keys.anchor_states(ledger.run_id)).removesuffix(".safetensors")
        number, _, digest = name.partition("-")
        if not number.isdecimal() or int(number) > step:
            continue
        if int(number) < keep_from or _is_nobodys(ledger.fire(int(number)), digest):
            store.delete(key)


def _is_nobodys(record: FireRecord | None, digest: str) -> bool:
    return record is not None and (record.state_digest or "") != digest
