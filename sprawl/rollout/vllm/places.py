"""Where a loader puts the elements of checkpoint tensors: found by watching it, so that changed elements can be written
there without it.

Nothing here knows how a model is fused or sharded. The loader is run once with `Tensor.copy_` watched instead of done:
the view that it copies from says which elements of the checkpoint tensor are meant, the view that it copies to says
where they live. What loads in another way has no place here and has to be loaded as before.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sprawl.delta import kernels
from sprawl.delta.bits import integer_view

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""A model's `load_weights`: what it returns is empty when the tensors are none of this model's."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Unplaced(Exception):
    """The loader does something that watching its copies does not explain."""


@dataclass(frozen=True)
class Piece:
    """A box of a contiguous checkpoint tensor and the view of a parameter that holds it, element by element.

    `offset` is the flat index of the box's first element, `strides` (elements, one a dimension) lead through it.
    """

    offset: int
    strides: tuple[int, ...]
    target: Tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether the parameter has, bit for bit, what `tensor` has in the box."""
        source = self._box(tensor.contiguous()).to(self.target.device, self.target.dtype)
        return bool(torch.equal(_bits(source), _bits(self.target)))

    def whole(self, tensor: Tensor) -> Write:
        """What writes all of the box. `tensor` is the checkpoint tensor, contiguous."""
        return Write(self.target, None, self._box(tensor).to(self.target.device, self.target.dtype))

    def some(self, indices: Tensor, values: Tensor) -> Write:
        """What writes those of the elements that are in the box. `indices` i64 [k] into the flat checkpoint tensor,
        `values` [k] of its dtype."""
        window = _window(self.target)
        to, at = indices - self.offset, torch.zeros_like(indices)
        if self._flat():
            inside = (to >= 0) & (to < self.target.numel())
            at = to
        else:
            inside = torch.ones_like(indices, dtype=torch.bool)
            for dimension in self._order():
                coordinate = torch.div(to, self.strides[dimension], rounding_mode="floor")
                to = to - coordinate * self.strides[dimension]
                inside &= (coordinate >= 0) & (coordinate < self.target.shape[dimension])
                at = at + coordinate * self.target.stride(dimension)
            inside &= to == 0
        if not bool(inside.all()):
            at, values = at[inside], values[inside]
        return Write(window, at.to(window.device), values.to(window.device, window.dtype))

    def regular(self) -> bool:
        """Whether the flat index of an element says which one of the box it is."""
        reach = 0  # how far the dimensions within this one lead
        for dimension in reversed(self._order()):
            if self.strides[dimension] <= reach:
                return False
            reach += self.strides[dimension] * (self.target.shape[dimension] - 1)
        return True

    def _order(self) -> list[int]:
        """Dimensions, the widest stride first; those of one element lead nowhere."""
        real = [d for d, size in enumerate(self.target.shape) if size > 1]
        return sorted(real, key=lambda d: -self.strides[d])

    def _flat(self) -> bool:
        """Whether the box is one run of elements on both sides."""
        run = 1
        for dimension in reversed(range(self.target.ndim)):
            if self.target.shape[dimension] > 1 and self.strides[dimension] != run:
                return False
            run *= self.target.shape[dimension]
        return self.target.is_contiguous()

    def _box(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.target.shape, self.strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Write:
    """One write, with all that it needs where the parameter is. Without indices it replaces all of `target`."""

    target: Tensor
    indices: Tensor | None
    values: Tensor

    def do(self) -> None:
        """Replacements: doing it again changes nothing."""
        if self.indices is None:
            self.target.copy_(self.values)
        elif self.target.device.type == "cpu":
            kernels.scatter(integer_view(self.target), self.indices.numpy(), integer_view(self.values))
        else:
            self.target[self.indices] = self.values


def watch(load: Load, tensors: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    """The places of `tensors` (contiguous, no two in the same memory). Names that the model loads, but not by copies of
    their elements, are left out; what it does not load at all has no pieces.

    Nothing else may use the model meanwhile. Writes that a loader does besides copying happen. Raises Unplaced when it
    copies from memory that is not of `tensors`, or from elements that it has rearranged beyond a view.
    """
    with torch.no_grad(), _watched(tensors) as found:
        load(tensors.items())
        silent = [name for name in tensors if name not in found]
        for name in silent:
            if not load([(name, tensors[name])]):
                found[name] = []
    return found


@contextmanager
def _watched(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, list[Piece]]]:
    starts = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items())
    found: dict[str, list[Piece]] = {}
    real, thread = Tensor.copy_, threading.get_ident()

    def noted(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if threading.get_ident() != thread:
            return real(target, source, non_blocking)
        at = bisect_right(starts, source.data_ptr(), key=lambda start: start[0]) - 1
        name = starts[at][1] if at >= 0 else ""
        offset = (source.data_ptr() - starts[at][0]) // source.element_size()
        if at < 0 or source.dtype != tensors[name].dtype or offset >= tensors[name].numel():
            raise Unplaced("it copies weights that it has computed")
        if source.shape != target.shape:
            raise Unplaced(f"it spreads {name} over more elements than it has")
        piece = Piece(offset, source.stride(), target.detach())
        if not piece.regular():
            raise Unplaced(f"it takes elements of {name} twice")
        found.setdefault(name, []).append(piece)
        return target

    Tensor.copy_ = noted  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        Tensor.copy_ = real  # type: ignore[method-assign]


def _window(target: Tensor) -> Tensor:
    """The memory between the first and the last element of a view, as one dimension."""
    span = 1 + sum(stride * (size - 1) for stride, size in zip(target.stride(), target.shape, strict=True))
    return target.as_strided((span if target.numel() else 0,), (1,), target.storage_offset())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])
