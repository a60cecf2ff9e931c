"""A store for the one writer of a run: every write first asks whether a newer writer took over.

A process that was declared dead may go on (it was suspended, its machine was cut off). Its successor holds a higher
epoch; from then on nothing that this store is asked to write reaches the board. The question and the write are two
requests, so a writer may still be stopped in between: what it then writes is either created exclusively or named by
its digest, and can replace nothing (`Ledger`, `Committer`, `sprawl.train.checkpoint`).
"""

from __future__ import annotations

from sprawl.board.ledger import Ledger
from sprawl.board.store import Keys, Store


class FencedStore:
    """Reads go through. Writes raise FencedError once an epoch above `epoch` exists; that costs one request each."""

    def __init__(self, store: Store, run_id: str, epoch: int) -> None:
        self._store = store
        self._ledger = Ledger(store, run_id)
        self._epoch = epoch

    @property
    def url(self) -> str:
        return self._store.url

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def exists(self, key: str) -> bool:
        return self._store.exists(key)

    def list(self, prefix: str) -> Keys:
        return self._store.list(prefix)

    def children(self, prefix: str) -> Keys:
        return self._store.children(prefix)

    def put(self, key: str, data: bytes) -> None:
        self._ledger.check_epoch(self._epoch)
        self._store.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._ledger.check_epoch(self._epoch)
        return self._store.create(key, data)

    def delete(self, key: str) -> None:
        self._ledger.check_epoch(self._epoch)
        self._store.delete(key)

    def sweep(self, prefix: str, older_than_s: float) -> int:
        self._ledger.check_epoch(self._epoch)
        return self._store.sweep(prefix, older_than_s)
