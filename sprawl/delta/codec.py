"""The lossless delta codec: what turns one served view into the next, bit for bit.

Memory beyond the two states: encoding needs the blob twice and a few units a thread (`sprawl.delta.scan`); decoding
needs the decoded patch (6 bytes a changed bf16 element), because nothing is touched before all of it is there.

Replacement semantics: a delta holds new values (relative to values that the receiver has, compared by their bits),
never a float difference. `decode` reads the intact base and touches nothing; `apply` may be repeated after a crash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from sprawl.delta import container, kernels
from sprawl.delta.bits import BITS, NIBBLES, Bits, integer_view
from sprawl.delta.scan import Found, fetch, sample, scan_unit, units, view_of
from sprawl.delta.segment import LIMIT, Patch, Segment, batches, decode_segment, encode_segment
from sprawl.delta.state import State, dtype_name
from sprawl.delta.whole import decode_whole, encode_whole, pack_tensor, unpack_tensor
from sprawl.errors import IntegrityError

__all__ = ["Encoded", "Overwrites", "TensorInfo", "apply", "decode", "decode_whole", "encode", "encode_whole"]

# Above this share of changed elements, in a sample, a tensor is coded both ways and the smaller form is sent.
_TRY_WHOLE = 0.5

Item = TypeVar("Item")
Result = TypeVar("Result")
Coded = tuple[list[Found], Segment]


@dataclass(frozen=True)
class TensorInfo:
    """How one tensor was sent. `changed` elements; all of them for a tensor that is new or changed dtype or shape."""

    kind: Literal["unchanged", "delta", "whole"]
    elements: int
    changed: int


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


@dataclass
class _Draft:
    """A delta in the making: header entries and the payload they describe, in order."""

    segments: list[dict[str, Any]] = field(default_factory=list)
    whole: list[dict[str, Any]] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    whole_parts: list[bytes] = field(default_factory=list)
    infos: dict[str, TensorInfo] = field(default_factory=dict)


def _ordered_map(
    pool: Executor | None, threads: int, function: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """`map` over a pool that is never more than 2 * threads items ahead, so that memory stays bounded."""
    if pool is None:
        yield from map(function, items)
        return
    ahead: deque[Future[Result]] = deque()
    for item in items:
        ahead.append(pool.submit(function, item))
        if len(ahead) >= 2 * threads:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _same_form(old: torch.Tensor | None, new: torch.Tensor) -> bool:
    return old is not None and old.dtype == new.dtype and old.shape == new.shape


def _same_bytes(old: torch.Tensor, new: torch.Tensor) -> bool:
    one, two = (tensor.reshape(-1).view(torch.uint8) for tensor in (old, new)) if old.numel() else (old, new)
    step = 1 << 24
    return all(
        kernels.count_changed(fetch(one, at, at + step), fetch(two, at, at + step)) == 0
        for at in range(0, one.numel(), step)
    )


def _mostly_changed(old: torch.Tensor, new: torch.Tensor) -> bool:
    before, now = sample(old), sample(new)
    return bool(before.size) and int(kernels.count_changed(before, now)) > _TRY_WHOLE * before.size


class _Encoder:
    """One call of `encode`: two states and the threads to compare them with."""

    def __init__(self, base: State, new: State, threads: int, pool: Executor | None) -> None:
        self.base, self.new = base, new
        self.threads, self.pool = threads, pool
        self.draft = _Draft()

    def run(self) -> _Draft:
        views: dict[tuple[str, bool], list[str]] = {}
        for name in sorted(self.new):
            old, new = self.base.get(name), self.new[name]
            if old is None or not _same_form(old, new):
                self._send_whole(name, pack_tensor(new))
            elif new.dtype not in BITS or new.numel() > LIMIT:
                if _same_bytes(old, new):
                    self.draft.infos[name] = TensorInfo("unchanged", new.numel(), 0)
                else:
                    self._send_whole(name, pack_tensor(new))
            elif new.numel() == 0:
                self.draft.infos[name] = TensorInfo("unchanged", 0, 0)
            else:
                view = view_of(old)
                if not (_mostly_changed(old, new) and self._settle(name, view)):
                    views.setdefault((dtype_name(new.dtype), view is NIBBLES), []).append(name)
        for (_, nibbles), names in sorted(views.items()):
            view = NIBBLES if nibbles else BITS[self.new[names[0]].dtype]
            for coded in self._code(names, view):
                self._send(coded, view)
        return self.draft

    def _code(self, names: Sequence[str], view: Bits) -> Iterator[Coded]:
        def scan(unit: list[Any]) -> Found:
            return scan_unit(unit, self.base, self.new, view)

        def code(batch: list[Found]) -> Coded:
            return batch, encode_segment(batch, view)

        found = _ordered_map(self.pool, self.threads, scan, units(names, self.new))
        return _ordered_map(self.pool, self.threads, code, batches(found))

    def _settle(self, name: str, view: Bits) -> bool:
        """Send a tensor that changed a lot, whole, if that is smaller. False when it is better as a delta."""
        size = sum(len(segment.payload) for _, segment in self._code([name], view))
        frames = pack_tensor(self.new[name])
        if sum(map(len, frames)) >= size:
            return False
        old, new = self.base[name], self.new[name]
        step = 1 << 24
        changed = sum(
            int(kernels.count_changed(fetch(old, at, at + step), fetch(new, at, at + step)))
            for at in range(0, new.numel(), step)
        )
        self._send_whole(name, frames, changed)
        return True

    def _send_whole(self, name: str, frames: list[bytes], changed: int | None = None) -> None:
        tensor = self.new[name]
        form = {"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        self.draft.whole.append({**form, "frames": [len(frame) for frame in frames]})
        self.draft.whole_parts += frames
        count = tensor.numel() if changed is None else changed
        self.draft.infos[name] = TensorInfo("whole", tensor.numel(), count)

    def _send(self, coded: Coded, view: Bits) -> None:
        batch, segment = coded
        pieces: list[list[Any]] = []
        for unit in batch:
            for piece, changed, words in zip(unit.pieces, unit.changed, unit.words, strict=True):
                if pieces and pieces[-1][0] == piece.name:
                    pieces[-1][2] = piece.stop
                    pieces[-1][3] += changed
                else:
                    pieces.append([piece.name, piece.start, piece.stop, changed])
                before = self.draft.infos.get(piece.name)
                total = words + (before.changed if before else 0)
                kind: Literal["unchanged", "delta"] = "delta" if total else "unchanged"
                self.draft.infos[piece.name] = TensorInfo(kind, self.new[piece.name].numel(), total)
        if not segment.payload:
            return
        entry = {"view": "nibbles" if view is NIBBLES else "elements", "pieces": pieces, "size": len(segment.payload)}
        self.draft.segments.append({**entry, **segment.header})
        self.draft.parts.append(segment.payload)


def encode(
    base: State, new: State, *, base_root: str | None = None, new_root: str | None = None, threads: int = 1
) -> Encoded:
    """The delta that turns `base` into `new`. Neither state is modified.

    Deterministic: the same bytes whatever `threads` is. Tensors on a device are fetched in pieces. Root digests, when
    given, are recorded in the blob for who applies it.
    """
    base = {name: tensor.detach().contiguous() for name, tensor in base.items()}
    new = {name: tensor.detach().contiguous() for name, tensor in new.items()}
    with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
        draft = _Encoder(base, new, threads, pool).run()
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
        blob=container.pack(header, [*draft.parts, *draft.whole_parts]),
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


def _decode_segment(
    tensors: list[tuple[str, torch.Tensor]], segment: dict[str, Any], payload: memoryview
) -> list[tuple[str, Patch]]:
    view = NIBBLES if segment["view"] == "nibbles" else BITS[tensors[segment["pieces"][0][0]][1].dtype]
    olds, names = [], []
    for place, start, stop, _ in segment["pieces"]:
        name, tensor = tensors[place]
        if not 0 <= start < stop <= tensor.numel():
            raise IntegrityError(f"patches elements {start} to {stop} of {name!r}, which has {tensor.numel()}")
        names.append(name)
        olds.append((fetch(tensor, start, stop), start))
    patches = decode_segment(olds, [piece[3] for piece in segment["pieces"]], segment, payload, view)
    return list(zip(names, patches, strict=True))


def _join(found: list[Patch]) -> Patch:
    if len(found) == 1:
        return found[0]
    return Patch(np.concatenate([p.indices for p in found]), np.concatenate([p.values for p in found]))


def decode(base: State, blob: bytes, *, name: str = "delta", threads: int = 1) -> Overwrites:
    """Decode a delta against the intact `base`, which is not touched.

    Raises IntegrityError naming the blob (`name`) when it is damaged or not a delta of `base`.
    """
    header, payload = container.unpack(blob, name)
    whole: dict[str, torch.Tensor] = {}
    found: dict[str, list[Patch]] = {}
    at = 0
    try:
        tensors = [
            (tensor, _base_tensor(base, tensor, _dtype(dtype), shape, name))
            for tensor, dtype, shape in header["tensors"]
        ]
        jobs = []
        for segment in header["segments"]:
            jobs.append((segment, payload[at : at + segment["size"]]))
            at += segment["size"]
        with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
            for patches in _ordered_map(pool, threads, lambda job: _decode_segment(tensors, *job), jobs):
                for tensor, patch in patches:
                    if patch.indices.size:
                        found.setdefault(tensor, []).append(patch)
        for item in header["whole"]:
            ends = np.cumsum([at, *item["frames"]]).tolist()
            frames = [payload[start:stop] for start, stop in zip(ends[:-1], ends[1:], strict=True)]
            whole[item["name"]] = unpack_tensor(frames, _dtype(item["dtype"]), item["shape"])
            at = ends[-1]
    except IntegrityError as error:
        raise IntegrityError(f"{name}: {error.message}", error.fix) from None
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise IntegrityError(f"{name} has a malformed header: {error!r}") from None
    if at != len(payload):
        raise IntegrityError(f"{name} has {len(payload) - at} bytes that its header does not name")
    patches_of = {tensor: _join(found.pop(tensor)) for tensor in sorted(found)}
    return Overwrites(patches_of, whole, list(header["removed"]), header["base_root"], header["new_root"])


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
        if _same_form(old, tensor) and old is not None and old.is_contiguous():
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
