"""Small models and batches for the trainer's tests."""

from __future__ import annotations

import torch

from sprawl.config import RunConfig, parse_config
from sprawl.policy import Architecture, Decoder
from sprawl.rollout.trajectories import RolloutBatch

HF_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def make_decoder(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    decoder = Decoder(Architecture.from_hf(HF_CONFIG))
    for parameter in decoder.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return decoder


def make_config(**sections: object) -> RunConfig:
    base: dict[str, object] = {
        "name": "test",
        "steps": 4,
        "policy": {"base": "unused", "stages": 4},
        "boundary": {"codec": "prf", "ratio": 0.25},
        "optimizer": {"lr": 1e-3},
        "grpo": {"microbatch_rows": 4},
        "probe": {"every": 2, "rows": 3},
    }
    return parse_config({**base, **sections})


def make_batch(seed: int = 0, groups: int = 3, samples: int = 4, step: int = 1) -> RolloutBatch:
    generator = torch.Generator().manual_seed(seed)
    count = groups * samples
    prompt = torch.randint(2, 5, (groups,), generator=generator).repeat_interleave(samples)
    response = torch.randint(1, 5, (count,), generator=generator)
    width = int((prompt + response).max())
    tokens = torch.randint(1, 11, (count, width), generator=generator)
    tokens = tokens.masked_fill(torch.arange(width)[None] >= (prompt + response)[:, None], 0)
    logprobs = -torch.rand(count, int(response.max()), generator=generator)
    logprobs = logprobs.masked_fill(torch.arange(logprobs.shape[1])[None] >= response[:, None], 0)
    return RolloutBatch(
        step=step,
        tokens=tokens.int(),
        prompt_lengths=prompt.int(),
        response_lengths=response.int(),
        logprobs=logprobs,
        rewards=(torch.arange(count) % samples < 2).float() * (torch.arange(count) >= samples).float(),
        groups=(torch.arange(count) // samples).int(),
        seeds=torch.arange(count),
        version_start=torch.zeros(count, dtype=torch.int32),
        version_end=torch.zeros(count, dtype=torch.int32),
        islands=("island-0",) * groups,
    )
