"""The lossless delta codec: what turns one served view into the next, bit for bit.

Memory beyond the two states. Encoding: the blob twice, and for each thread up to 51 bytes (bf16; 93 for 64-bit dtypes)
for each changed element that it is working on, of which there are at most a unit (`scan.UNIT`) and a segment
(`segment.MAX_CHANGED`): with few changes some megabytes a thread, 120 MB when everything changes. Decoding: the patch
(6 bytes a changed bf16 element), because nothing is touched before all of it is there, and up to 20 bytes for each
changed element of the segment that a thread is working on. Tensors sent whole take their compressed size, at decoding
their size. Tensors on a device are fetched a unit at a time.

Replacement semantics: a delta holds new values (relative to values that the receiver has, compared by their bits),
never a float difference. `decode` reads the intact base and touches nothing; `apply` may be repeated after a crash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from sprawl.delta import container, kernels
from sprawl.delta.bits import BITS, PACKED, integer_view
from sprawl.delta.draft import Drafter, TensorInfo, octets, same_form
from sprawl.delta.pool import Pool
from sprawl.delta.scan import fetch, words_of
from sprawl.delta.segment import Patch, decode_segment, merge_lanes, words_patch
from sprawl.delta.state import State, dtype_name
from sprawl.delta.whole import decode_whole, encode_whole, unpack_tensor
from sprawl.errors import IntegrityError

_WORTH_A_THREAD = 1 << 22  # elements; with fewer, starting threads costs what they save

__all__ = ["Encoded", "Overwrites", "TensorInfo", "apply", "decode", "decode_whole", "encode", "encode_whole"]


@dataclass(frozen=True)
class Encoded:
    """A delta. `changed` of `elements` served weights have other bits than before."""

    blob: bytes
    changed: int
    elements: int
    tensors: dict[str, TensorInfo]
    removed: list[str]


@dataclass(frozen=True)
class Overwrites:
    """A decoded delta: what to write where. `base_root` and `new_root` are root digests, None when not recorded."""

    patches: dict[str, Patch] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    base_root: str | None = None
    new_root: str | None = None

    @property
    def changed(self) -> list[str]:
        """Names of the tensors that are written, sorted."""
        return sorted([*self.patches, *self.whole])


def encode(
    base: State, new: State, *, base_root: str | None = None, new_root: str | None = None, threads: int = 1
) -> Encoded:
    """The delta that turns `base` into `new`. Neither state is modified.

    Deterministic: the same bytes whatever `threads` is. Tensors on a device are fetched in pieces. Root digests, when
    given, are recorded in the blob for who applies it.
    """
    base = {name: tensor.detach().contiguous() for name, tensor in base.items()}
    new = {name: tensor.detach().contiguous() for name, tensor in new.items()}
    with Pool(threads if sum(tensor.numel() for tensor in new.values()) > _WORTH_A_THREAD else 1) as pool:
        draft = Drafter(base, new, pool).run()
    removed = sorted(set(base) - set(new))
    sent = sorted({piece[0] for segment in draft.segments for piece in segment["pieces"]})
    header = {
        "tensors": [[name, dtype_name(new[name].dtype), list(new[name].shape)] for name in sent],
        "segments": draft.segments,
        "whole": draft.whole,
        "removed": removed,
        "base_root": base_root,
        "new_root": new_root,
    }
    place = {name: at for at, name in enumerate(sent)}
    for segment in draft.segments:
        segment["pieces"] = [[place[name], *rest] for name, *rest in segment["pieces"]]
    return Encoded(
        blob=container.pack(header, [*draft.segment_parts, *draft.whole_parts]),
        changed=sum(info.changed for info in draft.infos.values()),
        elements=sum(info.elements for info in draft.infos.values()),
        tensors=draft.infos,
        removed=removed,
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise IntegrityError(f"a delta holds dtype {name!r}, which this release does not know")
    return dtype


def _base_tensor(base: State, name: str, dtype: torch.dtype, shape: list[int], blob: str) -> torch.Tensor:
    tensor = base.get(name)
    if tensor is None:
        raise IntegrityError(f"{blob} patches tensor {name!r}, which the base does not have")
    if tensor.dtype != dtype or list(tensor.shape) != shape:
        raise IntegrityError(
            f"{blob} patches {name!r} as {dtype_name(dtype)}{shape}, "
            f"the base has {dtype_name(tensor.dtype)}{list(tensor.shape)}"
        )
    return tensor.detach().contiguous()


@dataclass
class _Room:
    """Where the patch of one tensor goes, piece after piece: `patch` has all its room, `used` of it is given away."""

    patch: Patch
    used: int = 0

    def take(self, count: int) -> Patch:
        start, self.used = self.used, self.used + count
        return Patch(self.patch.indices[start : self.used], self.patch.values[start : self.used])


def _piece_counts(segment: dict[str, Any], tensors: list[tuple[str, torch.Tensor]]) -> dict[int, int]:
    """Changed words of each tensor, by its place in `tensors`. Raises IntegrityError for what cannot be."""
    counts: dict[int, int] = {}
    lanes = 2 if segment["packed"] else 1
    for place, start, stop, changed in segment["pieces"]:
        name, tensor = tensors[place]
        size = tensor.nbytes if segment["packed"] else tensor.numel()
        if not (0 <= start < stop <= size and len(changed) == lanes and all(0 <= n <= stop - start for n in changed)):
            raise IntegrityError(f"patches {changed} of elements {start} to {stop} of {name!r}, which has {size}")
        counts[place] = counts.get(place, 0) + sum(changed)
    return counts


def _decode_segment(
    tensors: list[tuple[str, torch.Tensor]], segment: dict[str, Any], payload: memoryview, rooms: list[Patch]
) -> list[Patch]:
    """Fill `rooms`, one for each piece; those of packed codes are returned instead, as patches of bytes."""
    dtype = tensors[segment["pieces"][0][0]][1].dtype
    olds = []
    for place, start, stop, _ in segment["pieces"]:
        name, tensor = tensors[place]
        if tensor.dtype != dtype:
            raise IntegrityError(f"patches {name!r} together with tensors of another dtype")
        olds.append((fetch(words_of(octets(tensor) if segment["packed"] else tensor), start, stop), start))
    if not segment["packed"]:
        decode_segment(olds, [[room] for room in rooms], segment, payload, (BITS[dtype],))
        return rooms
    found = [
        [Patch(np.empty(count, np.uint32), np.empty(count, np.uint8)) for count in piece[3]]
        for piece in segment["pieces"]
    ]
    decode_segment(olds, found, segment, payload, PACKED[dtype])
    return [merge_lanes(*old, low, high) for old, (low, high) in zip(olds, found, strict=True)]


def _join(found: list[Patch], tensor: torch.Tensor) -> Patch:
    """The patch of a tensor from those of its bytes, piece by piece."""
    patch = Patch(np.concatenate([p.indices for p in found]), np.concatenate([p.values for p in found]))
    if BITS[tensor.dtype].unsigned == patch.values.dtype:
        return patch
    return words_patch(fetch(words_of(tensor), 0, tensor.numel()), patch)


def decode(base: State, blob: bytes, *, name: str = "delta", threads: int = 1) -> Overwrites:
    """Decode a delta against the intact `base`, which is not touched.

    Raises IntegrityError naming the blob (`name`) when it is damaged or not a delta of `base`.
    """
    header, payload = container.unpack(blob, name)
    patches: dict[str, Patch] = {}
    whole: dict[str, torch.Tensor] = {}
    at = 0
    try:
        tensors = [
            (tensor, _base_tensor(base, tensor, _dtype(dtype), shape, name))
            for tensor, dtype, shape in header["tensors"]
        ]
        sizes: dict[int, int] = {}
        for segment in header["segments"]:
            for place, count in _piece_counts(segment, tensors).items():
                sizes[place] = sizes.get(place, 0) + (0 if segment["packed"] else count)
        rooms = {
            place: _Room(Patch(np.empty(size, np.uint32), np.empty(size, BITS[tensors[place][1].dtype].unsigned)))
            for place, size in sizes.items()
        }
        jobs = []
        for segment in header["segments"]:
            taken = [rooms[piece[0]].take(0 if segment["packed"] else sum(piece[3])) for piece in segment["pieces"]]
            jobs.append((segment, payload[at : at + segment["size"]], taken))
            at += segment["size"]
        bytewise: dict[int, list[Patch]] = {}
        with Pool(threads if len(jobs) > 1 else 1) as pool:
            for job, found in zip(jobs, pool.map(lambda job: _decode_segment(tensors, *job), jobs), strict=True):
                for piece, patch in zip(job[0]["pieces"], found if job[0]["packed"] else (), strict=False):
                    bytewise.setdefault(piece[0], []).append(patch)
        for place, (tensor, old) in enumerate(tensors):
            patch = _join(bytewise.pop(place), old) if place in bytewise else rooms[place].patch
            if patch.indices.size:
                patches[tensor] = patch
        for item in header["whole"]:
            ends = np.cumsum([at, *item["frames"]]).tolist()
            frames = [payload[start:stop] for start, stop in pairwise(ends)]
            whole[item["name"]] = unpack_tensor(frames, _dtype(item["dtype"]), item["shape"])
            at = ends[-1]
    except IntegrityError as error:
        raise IntegrityError(f"{name}: {error.message}", error.fix) from None
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise IntegrityError(f"{name} has a malformed header: {error!r}") from None
    if at != len(payload):
        raise IntegrityError(f"{name} has {len(payload) - at} bytes that its header does not name")
    return Overwrites(patches, whole, list(header["removed"]), header["base_root"], header["new_root"])


def apply(state: State, overwrites: Overwrites) -> None:
    """Write decoded values into `state`, in place. Repeating it changes nothing.

    Patched tensors keep their memory; tensors sent whole are copied into it when dtype and shape agree and replaced
    otherwise. Patched tensors must be contiguous.
    """
    for name, patch in overwrites.patches.items():
        tensor = state[name]
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {name!r} is not contiguous, a patch would write into a copy of it")
        if tensor.device.type == "cpu":
            kernels.scatter(integer_view(tensor), patch.indices, patch.values)
        else:
            scatter_on_device(tensor, patch)
    for name, tensor in overwrites.whole.items():
        old = state.get(name)
        if same_form(old, tensor) and old is not None and old.is_contiguous():
            old.copy_(tensor)
        else:
            state[name] = tensor.clone()
    for name in overwrites.removed:
        state.pop(name, None)


def scatter_on_device(tensor: torch.Tensor, patch: Patch) -> None:
    """Write a patch into a contiguous tensor wherever it lives: indices and values travel, nothing else."""
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    indices = torch.from_numpy(patch.indices.astype(np.int64)).to(tensor.device)
    values = torch.from_numpy(np.ascontiguousarray(patch.values).view(f"i{tensor.element_size()}").copy())
    tensor.detach().reshape(-1).view(signed)[indices] = values.view(signed).to(tensor.device)
