"""LoRA adapters as served views: small by construction, so every version is published whole.

Layout: Hugging Face PEFT's `adapter_model.safetensors`, which vLLM and SGLang load as an adapter:
`base_model.model.<module>.lora_A.weight` [rank, in] and `...lora_B.weight` [out, rank]; `adapter_config.json` beside.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from sprawl.delta.views.build import State, make_view
from sprawl.errors import SprawlError

PREFIX = "base_model.model."
_FACTOR = re.compile(r"^(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight$")


def is_adapter(names: Collection[str]) -> bool:
    """Whether these tensor names are those of an adapter, which is published whole instead of as a delta."""
    return bool(names) and all(_FACTOR.match(name) for name in names)


def adapter_view(masters: Mapping[str, Tensor], dtype: str = "bfloat16") -> State:
    """An adapter as engines load it: PEFT's names, factors rounded to `dtype` (bfloat16 or float16).

    `masters` hold the two factors of every adapted module, named by PEFT's convention with or without its prefix and
    adapter name. Raises SprawlError naming the module whose factors are missing or do not fit each other.
    """
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in masters.items():
        match = _FACTOR.match(name)
        if match is None:
            raise SprawlError(f"{name} is no factor of an adapter", "names end in lora_A.weight or lora_B.weight")
        factors.setdefault(match["module"].removeprefix(PREFIX), {})[match["side"]] = tensor
    for module, pair in factors.items():
        if pair.keys() != {"A", "B"}:
            raise SprawlError(f"adapter of {module} has lora_{next(iter(pair))} only")
        a, b = pair["A"].shape, pair["B"].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise SprawlError(f"adapter of {module} has factors {tuple(a)} and {tuple(b)}, which do not multiply")
    named = {f"{PREFIX}{m}.lora_{side}.weight": t for m, pair in factors.items() for side, t in pair.items()}
    return make_view(named, dtype)


def adapter_config(view: Mapping[str, Tensor], alpha: float, base: str) -> dict[str, Any]:
    """`adapter_config.json` of a view: its ranks and the modules it adapts.

    `alpha`: the update is scaled by alpha / rank. `base`: name or path of the base model. Modules of another rank than
    the most common one go to PEFT's `rank_pattern`, with the alpha that keeps their scale.
    """
    ranks = {
        match["module"].removeprefix(PREFIX): tensor.shape[0]
        for name, tensor in view.items()
        if (match := _FACTOR.match(name)) and match["side"] == "A"
    }
    common = max(sorted(set(ranks.values())), key=list(ranks.values()).count)
    others = {module: rank for module, rank in ranks.items() if rank != common}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": common,
        "lora_alpha": alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
        "rank_pattern": others,
        "alpha_pattern": {module: alpha * rank / common for module, rank in others.items()},
        "bias": "none",
        "inference_mode": True,
    }
