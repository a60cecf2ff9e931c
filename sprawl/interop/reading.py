"""Reading the slime/miles/stitch disk layout: every version verified, nothing touched before all of it is decoded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sprawl.board.store import MissingKey, Store
from sprawl.delta.state import State, raw_bytes, tensor_digest
from sprawl.errors import BoardError, IntegrityError
from sprawl.interop.layout import INDEX, POINTER, Index, Pointer, checksum, decode, folder_name
from sprawl.interop.shards import unpack_blobs, unpack_state

_CONFIG_ENDINGS = (".json", ".txt", ".jinja", ".model")


@dataclass(frozen=True)
class Chain:
    """Versions from an anchor to the newest, ascending. `anchor` is the version a first delta stands on, None when the
    first version is full."""

    run_id: str | None
    indices: list[Index]
    anchor: int | None


class LayoutReader:
    """Reads versions below the root of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def pointer(self) -> Pointer:
        """What `latest` names. Raises BoardError when there is none."""
        try:
            data = self.store.get(POINTER)
        except MissingKey:
            raise BoardError(
                f"{self.store.url} has no `{POINTER}`", "give the root of a slime, miles or stitch disk layout"
            ) from None
        return Pointer.parse(data.decode(errors="replace"), f"{self.store.url}/{POINTER}")

    def chain(self) -> Chain:
        """The versions that lead to the newest one, back to the nearest full version (or to where the folder ends).

        Raises BoardError when the newest version is not there yet, IntegrityError when the chain is inconsistent.
        """
        pointer = self.pointer()
        folder = self._folder(pointer)
        indices: list[Index] = []
        version = pointer.version
        while True:
            key = f"{folder}{folder_name(version)}/{INDEX}"
            try:
                data = self.store.get(key)
            except MissingKey:
                if indices:
                    return Chain(pointer.run_id, indices[::-1], version)
                # A missing index never means "full": it may just not be visible yet.
                raise BoardError(f"{self.store.url}: {key} is not there (yet)", "try again") from None
            index = Index.from_bytes(data, key)
            if index.version != version:
                raise IntegrityError(f"{key} is the index of version {index.version}")
            indices.append(index)
            if index.base_version is None:
                return Chain(pointer.run_id, indices[::-1], None)
            if index.base_version >= version:
                raise IntegrityError(f"{key} is a delta against version {index.base_version}, which is not older")
            version = index.base_version

    def apply(self, state: State, version: int | None, index: Index) -> State:
        """The state of `index`, from `state` of `version` (which is not touched; unchanged tensors are shared).

        Raises IntegrityError naming tensor, version and checksum when the delta does not lead to what it promises.
        """
        folder = f"{self._folder(self.pointer())}{folder_name(index.version)}/"
        if index.encoding is None:
            return self._full(folder, index)
        if index.base_version != version:
            raise IntegrityError(
                f"version {index.version} is a delta against version {index.base_version}, the state here is version "
                f"{version}"
            )
        new: State = {}
        for file in sorted(set(index.weight_map.values())):
            key = folder + file
            blobs, sums = unpack_blobs(self._shard(key, index), key)
            self._check_names(key, set(blobs), {n for n, f in index.weight_map.items() if f == file})
            for name, blob in blobs.items():
                new[name] = self._tensor(state, index, name, blob, sums.get(name), key)
        return {**state, **new}

    def check_same(self, state: State, index: Index) -> None:
        """Raises IntegrityError when `state` is not what the layout holds under this version: a number used again.

        A delta speaks of the tensors it changes only.
        """
        folder = f"{self._folder(self.pointer())}{folder_name(index.version)}/"
        if index.encoding is None:
            full = self._full(folder, index)
            different = sorted(set(full) ^ set(state)) or [
                name for name in sorted(full) if tensor_digest(full[name]) != tensor_digest(state[name])
            ]
        else:
            sums: dict[str, str] = {}
            for file in sorted(set(index.weight_map.values())):
                sums |= unpack_blobs(self._shard(folder + file, index), folder + file)[1]
            different = [
                name
                for name in sorted(index.weight_map)
                if name not in state or sums.get(name) != checksum(index.checksum, raw_bytes(state[name]))
            ]
        if different:
            raise IntegrityError(
                f"version {index.version} of {self.store.url} is not the one that was imported: tensor "
                f"{different[0]!r} differs",
                "the trainer counts its versions again: import it under another run id",
            )

    def files(self, version: int) -> dict[str, bytes]:
        """config.json, tokenizer.json ... beside a full version's weights."""
        folder = f"{self._folder(self.pointer())}{folder_name(version)}/"
        names = [name for name in self.store.children(folder) if name.endswith(_CONFIG_ENDINGS)]
        return {name: self.store.get(folder + name) for name in names if ".safetensors" not in name}

    def _folder(self, pointer: Pointer) -> str:
        """Where the run's versions are: "", or ending in "/". The one the pointer spells out comes first."""
        candidates = [f"{pointer.run_id}/"] if pointer.run_id else [""]
        for folder in (*candidates, "updates/"):
            if self.store.exists(f"{folder}{folder_name(pointer.version)}/{INDEX}"):
                return folder
        return candidates[0]

    def _shard(self, key: str, index: Index) -> bytes:
        try:
            return self.store.get(key)
        except MissingKey:
            raise IntegrityError(f"version {index.version} names {key}, which is not there") from None

    def _check_names(self, key: str, found: set[str], expected: set[str]) -> None:
        wrong = sorted(found ^ expected)
        if wrong:
            side = "holds" if wrong[0] in found else "does not hold"
            raise IntegrityError(f"{key} {side} tensor {wrong[0]!r}, its index says otherwise")

    def _tensor(
        self, state: State, index: Index, name: str, blob: bytes, expected: str | None, key: str
    ) -> torch.Tensor:
        where = f"version {index.version}, tensor {name!r}"
        if name not in state:
            raise IntegrityError(f"{where}: the base, version {index.base_version}, does not have it (tied weights?)")
        if expected is None:
            raise IntegrityError(f"{where}: {key} has no checksum for it")
        assert index.encoding is not None
        data = decode(index.encoding, raw_bytes(state[name]), blob, where)
        found = checksum(index.checksum, data)
        if found != expected:
            raise IntegrityError(f"{where}: the new bytes have {index.checksum} {found}, published was {expected}")
        tensor = torch.empty_like(state[name], memory_format=torch.contiguous_format)
        raw_bytes(tensor)[:] = data
        return tensor

    def _full(self, folder: str, index: Index) -> State:
        state: State = {}
        for file in sorted(set(index.weight_map.values())):
            key = folder + file
            tensors = unpack_state(self._shard(key, index), key)
            self._check_names(key, set(tensors), {n for n, f in index.weight_map.items() if f == file})
            state.update(tensors)
        return state
