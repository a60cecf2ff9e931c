"""Which tensors have to be loaded together: pure arithmetic on names.

vLLM loads a layer as a whole: its q, k and v projections are one matrix, gate and up another, a weight and its bias or
its scales belong to the same module. A module of which only a part is loaded holds uninitialised memory in the rest, so
a set of changed tensors is closed over modules before it is loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

FUSED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""How the Llama and Qwen families are fused. Other models name their own groups (`packed_modules_mapping`)."""


def module_of(name: str, fused: Mapping[str, Sequence[str]] = FUSED) -> str:
    """The engine's module that holds checkpoint tensor `name`. All experts of a mixture are one module.

    >>> module_of("model.layers.3.self_attn.k_proj.bias")
    'model.layers.3.self_attn.qkv_proj'
    """
    parts = name.split(".")[:-1]
    for position in range(len(parts) - 1):
        if parts[position] == "experts" and parts[position + 1].isdigit():
            return ".".join(parts[: position + 1])
    if parts:
        whole = (group for group, members in fused.items() if parts[-1] in members)
        parts[-1] = next(whole, parts[-1])
    return ".".join(parts)


def close(changed: Iterable[str], names: Iterable[str], fused: Mapping[str, Sequence[str]] = FUSED) -> list[str]:
    """`changed` and every one of `names` that shares a module with one of them, sorted.

    Raises KeyError naming a changed tensor that is not among `names`.
    """
    modules: dict[str, list[str]] = defaultdict(list)
    home: dict[str, str] = {}
    for name in names:
        home[name] = module_of(name, fused)
        modules[home[name]].append(name)
    return sorted({name for module in {home[name] for name in changed} for name in modules[module]})
