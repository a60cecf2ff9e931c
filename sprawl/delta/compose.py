"""Algebra of decoded deltas: several into one, and the way back. No weights are needed to compose.

A decoded delta (`Overwrites`) says what to write where. Writing two one after the other is writing their composition:
the union of their positions, the later value where both have one. So k steps of a chain become one patch whose size
is that of the positions they touch together, whatever k is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch

from sprawl.delta.bits import integer_view
from sprawl.delta.codec import Overwrites
from sprawl.delta.segment import Patch
from sprawl.delta.state import State
from sprawl.errors import IntegrityError


def compose(steps: Sequence[Overwrites]) -> Overwrites:
    """One set of overwrites that does what `steps` do in order. Shares memory with them, copies nothing it need not.

    The result has the base root of the first step and the new root of the last. Raises IntegrityError when the steps
    cannot follow each other (a patch of a tensor that an earlier step removed, roots that do not meet).
    """
    patches: dict[str, list[Patch]] = {}
    whole: dict[str, torch.Tensor] = {}
    removed: set[str] = set()
    for before, after in pairwise(steps):
        if before.new_root is not None and after.base_root is not None and before.new_root != after.base_root:
            raise IntegrityError(f"deltas do not meet: one ends at {before.new_root}, the next needs {after.base_root}")
    for step in steps:
        for name, patch in step.patches.items():
            if name in removed:
                raise IntegrityError(f"a delta patches tensor {name!r}, which an earlier one removed")
            if name in whole:
                whole[name] = _patched(whole[name], patch)
            else:
                patches.setdefault(name, []).append(patch)
        for name, tensor in step.whole.items():
            patches.pop(name, None)
            removed.discard(name)
            whole[name] = tensor
        for name in step.removed:
            patches.pop(name, None)
            whole.pop(name, None)
            removed.add(name)
    return Overwrites(
        patches={name: _merge(found) for name, found in patches.items()},
        whole=whole,
        removed=sorted(removed),
        base_root=steps[0].base_root if steps else None,
        new_root=steps[-1].new_root if steps else None,
    )


def combine(parts: Iterable[Overwrites], name: str) -> Overwrites:
    """The overwrites of several writers of one version; each tensor may come from one of them only.

    Raises IntegrityError naming the version's delta (`name`) and the tensor that two parts write.
    """
    patches: dict[str, Patch] = {}
    whole: dict[str, torch.Tensor] = {}
    removed: set[str] = set()
    for part in parts:
        for tensor in part.changed:
            if tensor in patches or tensor in whole:
                raise IntegrityError(f"{name}: tensor {tensor!r} is in the parts of two writers")
        patches.update(part.patches)
        whole.update(part.whole)
        removed.update(part.removed)
    both = sorted(removed & (set(patches) | set(whole)))
    if both:
        raise IntegrityError(f"{name}: tensor {both[0]!r} is written by one part and removed by another")
    return Overwrites(patches, whole, sorted(removed))


def inverse(state: State, overwrites: Overwrites) -> Overwrites:
    """What takes `state` back once `overwrites` are applied to it. Call it before; `state` is not touched.

    Positions that are patched are remembered by their old values, tensors that are replaced or removed as copies.
    """
    patches = {
        name: Patch(patch.indices, integer_view(state[name].contiguous())[patch.indices])
        for name, patch in overwrites.patches.items()
    }
    gone = [name for name in (*overwrites.whole, *overwrites.removed) if name in state]
    return Overwrites(
        patches=patches,
        whole={name: state[name].detach().clone() for name in gone},
        removed=sorted(name for name in overwrites.whole if name not in state),
        base_root=overwrites.new_root,
        new_root=overwrites.base_root,
    )


def restrict(overwrites: Overwrites, names: set[str]) -> Overwrites:
    """The part of `overwrites` that concerns `names`."""
    return Overwrites(
        patches={name: patch for name, patch in overwrites.patches.items() if name in names},
        whole={name: tensor for name, tensor in overwrites.whole.items() if name in names},
        removed=[name for name in overwrites.removed if name in names],
    )


def overwrites_bytes(overwrites: Overwrites) -> int:
    """Bytes that the decoded form takes in memory."""
    patched = sum(patch.indices.nbytes + patch.values.nbytes for patch in overwrites.patches.values())
    return patched + sum(tensor.numel() * tensor.element_size() for tensor in overwrites.whole.values())


def _patched(tensor: torch.Tensor, patch: Patch) -> torch.Tensor:
    copy = tensor.detach().clone().contiguous()
    integer_view(copy)[patch.indices] = patch.values
    return copy


def _merge(found: list[Patch]) -> Patch:
    """The union of patches of one tensor, ascending; the last value of a position stands."""
    if len(found) == 1:
        return found[0]
    indices = np.concatenate([patch.indices for patch in found])
    values = np.concatenate([patch.values for patch in found])
    # Stable: equal positions stay in the order of the steps. The inputs are ascending runs, which merge quickly.
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], values[order]
    last = np.ones(indices.size, bool)
    last[:-1] = indices[1:] != indices[:-1]
    return Patch(indices[last], values[last])
