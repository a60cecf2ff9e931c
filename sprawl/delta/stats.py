"""What changed between two served views, and what it costs: numbers behind `sprawl delta stats`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from sprawl.delta.bits import BITS, integer_view
from sprawl.delta.codec import encode
from sprawl.delta.state import State, state_bytes

_GROUPS = (
    ("norm", re.compile(r"norm|\.ln_")),  # first: layer norms are often named after what they precede
    ("embedding", re.compile(r"embed|wte|wpe|lm_head")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|ffn|feed_forward|experts")),
)


@dataclass(frozen=True)
class GroupStats:
    """Tensors of one kind: `elements`, how many `changed`, the bytes of a delta of them alone, and whole."""

    group: str
    tensors: int
    elements: int
    changed: int
    delta_bytes: int
    whole_bytes: int


@dataclass(frozen=True)
class DecadeStats:
    """Elements whose old magnitude is in [10**exponent, 10**(exponent+1)); `exponent` None: zero.

    `floor` is the median half-ulp there: a smaller push leaves the served value as it is.
    `step` is the median |new - old| of the served values that changed (whole ulps, so never below the floor).
    """

    exponent: int | None
    elements: int
    changed: int
    floor: float
    step: float | None


@dataclass(frozen=True)
class DeltaStats:
    groups: list[GroupStats]
    decades: list[DecadeStats]
    total: GroupStats

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def group_of(name: str) -> str:
    """embedding, norm, attention, mlp or other, by the tensor's Hugging Face name."""
    return next((group for group, pattern in _GROUPS if pattern.search(name)), "other")


def delta_stats(old: State, new: State) -> DeltaStats:
    """Compare two views. Tensors on one side only are counted as changed (new) or ignored (removed)."""
    groups = {}
    for group in sorted({group_of(name) for name in new}):
        names = [name for name in new if group_of(name) == group]
        groups[group] = _group_stats(group, old, {name: new[name] for name in names})
    return DeltaStats(list(groups.values()), _decades(old, new), _group_stats("all", old, new))


def _group_stats(group: str, old: State, new: State) -> GroupStats:
    encoded = encode({name: old[name] for name in new if name in old}, new)
    return GroupStats(group, len(new), encoded.elements, encoded.changed, len(encoded.blob), state_bytes(new))


def _decades(old: State, new: State) -> list[DecadeStats]:
    magnitudes, moved, pushes, floors = [], [], [], []
    for name, tensor in new.items():
        before = old.get(name)
        if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
            continue
        if not tensor.is_floating_point() or tensor.dtype not in BITS:
            continue
        values = before.reshape(-1).to(torch.float64)
        magnitudes.append(values.abs().numpy())
        moved.append(integer_view(before) != integer_view(tensor))
        pushes.append((tensor.reshape(-1).to(torch.float64) - values).abs().numpy())
        floors.append(_half_ulp(values.abs(), before.dtype).numpy())
    if not magnitudes:
        return []
    magnitude, change = np.concatenate(magnitudes), np.concatenate(moved)
    push, floor = np.concatenate(pushes), np.concatenate(floors)
    finite = np.isfinite(magnitude)
    decade = np.full(magnitude.shape, -(10**6))
    positive = finite & (magnitude > 0)
    decade[positive] = np.floor(np.log10(magnitude[positive])).astype(int)
    rows = []
    for exponent in sorted(set(decade[finite].tolist()), reverse=True):
        member = finite & (decade == exponent)
        steps = push[member & change]
        rows.append(
            DecadeStats(
                exponent=None if exponent == -(10**6) else int(exponent),
                elements=int(member.sum()),
                changed=int((member & change).sum()),
                floor=float(np.median(floor[member])),
                step=float(np.median(steps)) if steps.size else None,
            )
        )
    return rows


def _half_ulp(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the spacing of `dtype` at `magnitude` (float64)."""
    info = torch.finfo(dtype)
    return torch.exp2(torch.floor(torch.log2(magnitude.clamp(min=info.tiny)))) * info.eps / 2
