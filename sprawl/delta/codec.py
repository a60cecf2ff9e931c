"""The lossless delta codec: what turns one served view into the next, bit for bit.

Replacement semantics: a delta holds new values (relative to values that the receiver has, compared by their bits),
never a float difference. `decode` reads the intact base and touches nothing; `apply` may be repeated after a crash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from sprawl.delta import container, kernels
from sprawl.delta.bits import BITS, integer_view
from sprawl.delta.segment import LIMIT, MAX_ELEMENTS, Patch, Segment, decode_segment, encode_segment
from sprawl.delta.state import State, dtype_name, raw_bytes
from sprawl.delta.whole import decode_whole, encode_whole, pack_tensor, unpack_tensor
from sprawl.errors import IntegrityError

__all__ = ["Encoded", "Overwrites", "TensorInfo", "apply", "decode", "decode_whole", "encode", "encode_whole"]

# Above this share of changed elements a tensor is coded both ways and the smaller form is sent.
_TRY_WHOLE = 0.5


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


def _same_form(old: torch.Tensor | None, new: torch.Tensor) -> bool:
    return old is not None and old.dtype == new.dtype and old.shape == new.shape


def _count_changed(old: torch.Tensor, new: torch.Tensor) -> int:
    return int(kernels.count_changed(integer_view(old), integer_view(new)))


def _batches(names: Sequence[str], new: State) -> Iterator[list[str]]:
    """Names grouped into segments: one dtype each, bounded elements."""
    batch: list[str] = []
    elements = 0
    for name in sorted(names, key=lambda name: (dtype_name(new[name].dtype), name)):
        size = new[name].numel()
        if batch and (new[batch[0]].dtype != new[name].dtype or elements + size > MAX_ELEMENTS):
            yield batch
            batch, elements = [], 0
        batch.append(name)
        elements += size
    if batch:
        yield batch


def _encode_batch(names: list[str], base: State, new: State, changed: dict[str, int]) -> Segment:
    pairs = [(integer_view(base[name]), integer_view(new[name])) for name in names]
    return encode_segment(pairs, [changed[name] for name in names], BITS[new[names[0]].dtype])


def _whole_is_smaller(name: str, base: State, new: State, changed: dict[str, int]) -> bool:
    segment = _encode_batch([name], base, new, changed)
    return len(pack_tensor(new[name])) < len(segment.payload)


def _classify(base: State, new: State) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    tensors: dict[str, TensorInfo] = {}
    changed: dict[str, int] = {}
    for name in sorted(new):
        size = new[name].numel()
        old = base.get(name)
        if old is None or not _same_form(old, new[name]):
            tensors[name] = TensorInfo("whole", size, size)
            continue
        if new[name].dtype not in BITS or size > LIMIT:
            same = bool((raw_bytes(old) == raw_bytes(new[name])).all())
            tensors[name] = TensorInfo("unchanged", size, 0) if same else TensorInfo("whole", size, size)
            continue
        count = _count_changed(old, new[name])
        changed[name] = count
        kind: Literal["unchanged", "delta", "whole"] = "delta" if count else "unchanged"
        if count > _TRY_WHOLE * size and _whole_is_smaller(name, base, new, {name: count}):
            kind = "whole"
        tensors[name] = TensorInfo(kind, size, count)
    return tensors, changed


def encode(base: State, new: State, *, base_root: str | None = None, new_root: str | None = None) -> Encoded:
    """The delta that turns `base` into `new`. Deterministic; neither state is modified.

    Tensors are contiguous CPU tensors. Root digests, when given, are recorded in the blob for who applies it.
    """
    base = {name: tensor.contiguous() for name, tensor in base.items()}
    new = {name: tensor.contiguous() for name, tensor in new.items()}
    tensors, changed = _classify(base, new)
    removed = sorted(set(base) - set(new))
    parts: list[bytes] = []
    segments: list[dict[str, Any]] = []
    for batch in _batches([name for name, info in tensors.items() if info.kind == "delta"], new):
        segment = _encode_batch(batch, base, new, changed)
        segments.append(
            {
                "dtype": dtype_name(new[batch[0]].dtype),
                "tensors": [[name, list(new[name].shape)] for name in batch],
                "size": len(segment.payload),
                **segment.header,
            }
        )
        parts.append(segment.payload)
    whole: list[dict[str, Any]] = []
    for name in [name for name, info in tensors.items() if info.kind == "whole"]:
        parts.append(pack_tensor(new[name]))
        form = {"name": name, "dtype": dtype_name(new[name].dtype), "shape": list(new[name].shape)}
        whole.append({**form, "size": len(parts[-1])})
    header = {"segments": segments, "whole": whole, "removed": removed, "base_root": base_root, "new_root": new_root}
    return Encoded(
        blob=container.pack(header, b"".join(parts)),
        changed=sum(info.changed for info in tensors.values()),
        elements=sum(info.elements for info in tensors.values()),
        tensors=tensors,
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
    return tensor.contiguous()


def decode(base: State, blob: bytes, *, name: str = "delta") -> Overwrites:
    """Decode a delta against the intact `base`, which is not touched.

    Raises IntegrityError naming the blob (`name`) when it is damaged or not a delta of `base`.
    """
    header, payload = container.unpack(blob, name)
    patches: dict[str, Patch] = {}
    whole: dict[str, torch.Tensor] = {}
    at = 0
    try:
        for segment in header["segments"]:
            dtype = _dtype(segment["dtype"])
            tensors = segment["tensors"]
            olds = [integer_view(_base_tensor(base, tensor, dtype, shape, name)) for tensor, shape in tensors]
            found = decode_segment(olds, segment, payload[at : at + segment["size"]], BITS[dtype])
            patches.update((tensor, patch) for (tensor, _), patch in zip(tensors, found, strict=True))
            at += segment["size"]
        for item in header["whole"]:
            data = bytes(payload[at : at + item["size"]])
            whole[item["name"]] = unpack_tensor(data, _dtype(item["dtype"]), item["shape"])
            at += item["size"]
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
        kernels.scatter(integer_view(tensor), patch.indices, patch.values)
    for name, tensor in overwrites.whole.items():
        old = state.get(name)
        if _same_form(old, tensor) and old is not None and old.is_contiguous():
            old.copy_(tensor)
        else:
            state[name] = tensor.clone()
    for name in overwrites.removed:
        state.pop(name, None)
