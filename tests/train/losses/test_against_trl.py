"""The same numbers as TRL's GRPOTrainer on the same tensors. TRL's were recorded (`record_trl`, versions in the file);
its `grpo` is our sequence_mean, its `dapo` our token_mean."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from sprawl.config import GrpoConfig
from sprawl.train.losses.aggregate import sample_weights
from sprawl.train.losses.objective import microbatch_loss
from tests.train.losses.record_trl import CASES, FILE, MAX_TOKENS, inputs

RECORDED = json.loads(FILE.read_text())
OURS: dict[str, tuple[dict[str, Any], str]] = {
    "grpo": ({}, "sequence_mean"),
    "grpo_kl": ({"kl_coef": 0.1, "kl": "k3"}, "sequence_mean"),
    "clip_higher": ({"clip_high": 0.28}, "token_mean"),
    "token_mean": ({}, "token_mean"),
    "dr_grpo": ({}, "dr_grpo"),
    "gspo": ({"loss": "gspo", "clip_low": 0.05, "clip_high": 0.08}, "sequence_mean"),
    "cispo": ({"loss": "cispo", "clip_low": 1.0, "clip_high": 0.3}, "token_mean"),
    "on_policy": ({}, "token_mean"),
}


def test_every_recorded_case_is_compared() -> None:
    assert OURS.keys() == CASES.keys() == RECORDED["cases"].keys()


@pytest.mark.parametrize("name", OURS)
def test_loss_and_gradient_equal_trls(name: str) -> None:
    given, (settings, aggregation) = inputs(), OURS[name]
    present = given["mask"].bool()
    logprobs = given["logprobs"].clone().requires_grad_()
    flat = logprobs[present]
    old = flat.detach() if name == "on_policy" else given["old"][present]
    counts = given["mask"].sum(1)
    weights = sample_weights(counts, torch.ones(len(counts), dtype=torch.bool), aggregation, MAX_TOKENS)  # type: ignore[arg-type]
    config = GrpoConfig.model_validate(settings)
    result = microbatch_loss(flat, old, None, given["reference"][present], given["advantages"], weights, counts, config)
    result.loss.backward()
    assert logprobs.grad is not None
    assert float(result.loss.detach()) == pytest.approx(RECORDED["cases"][name]["loss"], rel=1e-5, abs=1e-7)
    assert torch.allclose(logprobs.grad, torch.tensor(RECORDED["cases"][name]["gradient"]), rtol=1e-4, atol=1e-7)
    assert float(logprobs.grad.abs().max()) > 1e-3
