"""Parameters that clients always send and that only make sense here at their neutral value: accepted at that value,
refused at any other, because ignoring them would change what the client thinks it got."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPENAI: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": (None,),
    "top_logprobs": (0,),
}

SGLANG_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1,),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "ignore_eos": (False,),
    "skip_special_tokens": (False,),
    "spaces_between_special_tokens": (True, False),  # the tokenizers library knows no such thing
}

SGLANG_REQUEST: Mapping[str, tuple[Any, ...]] = {
    "logprob_start_len": (-1,),
    "top_logprobs_num": (0,),
    "return_text_in_logprobs": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "image_data": (None,),
    "lora_path": (None,),
    "routed_dp_rank": (0,),
    "log_metrics": (True,),
}


def drop_neutral(data: Any, known: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> Any:
    """`data` without the neutral parameters that are no fields of the model. Raises ValueError naming the first that
    has another value; null counts as absent."""
    if not isinstance(data, dict):
        return data
    for name in neutral.keys() & data.keys() - known.keys():
        value = data[name]
        if value is not None and not any(value == ok and type(value) in _alike(ok) for ok in neutral[name]):
            raise ValueError(f"{name!r} is not supported; leave it out or send {neutral[name][0]!r}")
    return {name: value for name, value in data.items() if name in known or name not in neutral}


def _alike(value: Any) -> tuple[type, ...]:
    """Types in which JSON may write `value`: 1 may be 1.0, but neither is true."""
    return (bool,) if isinstance(value, bool) else (int, float)
