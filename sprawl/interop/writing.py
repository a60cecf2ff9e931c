"""Writing the slime/miles/stitch disk layout: shards, then the index, then the pointer, each atomically."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sprawl.board.store import MissingKey, Store
from sprawl.delta.state import State, raw_bytes, state_bytes
from sprawl.errors import BoardError
from sprawl.interop.layout import INDEX, POINTER, Encoding, Index, Pointer, checksum, encode, folder_name
from sprawl.interop.shards import pack_blobs, pack_state, split

_SHARD_BYTES = 1 << 30  # of compressed blobs in a delta's shard


class LayoutWriter:
    """Writes one run's versions below `<folder>/` of a store (default: the run's id, where stitch looks for it)."""

    def __init__(
        self, store: Store, run_id: str, *, encoding: Encoding, checksum: str, folder: str | None = None
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._encoding: Encoding = encoding
        self._checksum = checksum
        self._folder = run_id if folder is None else folder.strip("/")

    def head(self) -> int | None:
        """The version `latest` names, None when there is none. Raises BoardError when it is of another run."""
        try:
            data = self._store.get(POINTER)
        except MissingKey:
            return None
        pointer = Pointer.parse(data.decode(errors="replace"), f"{self._store.url}/{POINTER}")
        if pointer.run_id != self._run_id:
            raise BoardError(
                f"{self._store.url} holds versions of run {pointer.run_id!r}, not of {self._run_id!r}",
                "choose an empty target",
            )
        return pointer.version

    def full(self, version: int, state: State, files: Mapping[str, bytes]) -> int:
        """Write a whole version, with config and tokenizer `files` beside it. Returns its bytes."""
        groups = split(state)
        weight_map: dict[str, str] = {}
        written = 0
        for number, names in enumerate(groups, start=1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            written += self._put(version, file, pack_state({name: state[name] for name in names}))
            weight_map |= dict.fromkeys(names, file)
        for name, data in files.items():
            written += self._put(version, name, data)
        return written + self._commit(Index(version, None, None, self._checksum, weight_map), state_bytes(state))

    def delta(self, version: int, base_version: int, old: Mapping[str, np.ndarray], new: State) -> int:
        """Write what turns `base_version` into `version`. Returns its bytes; none changed is an empty delta.

        `old` maps the tensors that may have changed to their bytes before, uint8 [n]; `new` holds at least those.
        Tensors have to keep dtype and shape, which the layout cannot express: write such a version in full.
        """
        weight_map: dict[str, str] = {}
        written = 0
        blobs: dict[str, bytes] = {}
        sums: dict[str, str] = {}
        held = 0
        shards: list[tuple[dict[str, bytes], dict[str, str]]] = []
        for name in sorted(old):
            before, data = old[name], raw_bytes(new[name])
            if (before == data).all():
                continue
            blob = encode(self._encoding, before, data, name)
            if blobs and held + len(blob) > _SHARD_BYTES:
                shards.append((blobs, sums))
                blobs, sums, held = {}, {}, 0
            blobs[name], sums[name] = blob, checksum(self._checksum, data)
            held += len(blob)
        if blobs:
            shards.append((blobs, sums))
        for number, (blobs, sums) in enumerate(shards, start=1):
            file = f"delta-{number:05d}-of-{len(shards):05d}.safetensors"
            written += self._put(version, file, pack_blobs(blobs, sums))
            weight_map |= dict.fromkeys(blobs, file)
        index = Index(version, base_version, self._encoding, self._checksum, weight_map)
        return written + self._commit(index, sum(len(b) for blobs, _ in shards for b in blobs.values()))

    def _put(self, version: int, name: str, data: bytes) -> int:
        self._store.put(f"{self._folder}/{folder_name(version)}/{name}".lstrip("/"), data)
        return len(data)

    def _commit(self, index: Index, total_size: int) -> int:
        size = self._put(index.version, INDEX, index.to_bytes(total_size))
        head = self.head()
        if head is not None and index.version <= head:
            raise BoardError(f"{self._store.url} is at version {head} already; it must not go back to {index.version}")
        self._store.put(POINTER, str(Pointer(self._run_id, index.version)).encode())
        return size
