"""Writes trl_reference.json: losses and gradients computed by TRL's own GRPOTrainer._compute_loss.

    python -m tests.train.losses.record_trl        in an environment with TRL (it brings accelerate, datasets, pandas
                                                   and pyarrow, too much for a development dependency)

The method runs on given log-probs instead of a model's: a bare object stands for the trainer and hands them out.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FILE = Path(__file__).with_name("trl_reference.json")
MAX_TOKENS = 7
SHAPE = (6, 5)
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo_kl": {"loss_type": "grpo", "beta": 0.1},
    "clip_higher": {"loss_type": "bnpo", "epsilon_high": 0.28},
    "token_mean": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08},
    "cispo": {"loss_type": "cispo", "epsilon_high_cispo": 1.3},
    "on_policy": {"loss_type": "dapo", "on_policy": True},
}


def inputs() -> dict[str, torch.Tensor]:
    """[B, T] log-probs of three policies, [B] advantages, [B, T] mask of ragged completions."""
    generator = torch.Generator().manual_seed(11)
    old = -torch.rand(SHAPE, generator=generator) * 3
    lengths = torch.tensor([5, 1, 3, 4, 2, 5])
    return {
        "logprobs": old + 0.3 * torch.randn(SHAPE, generator=generator),
        "old": old,
        "reference": old + 0.3 * torch.randn(SHAPE, generator=generator),
        "advantages": torch.randn(SHAPE[0], generator=generator),
        "mask": (torch.arange(SHAPE[1])[None] < lengths[:, None]).long(),
    }


def by_trl(case: dict[str, Any]) -> tuple[float, list[list[float]]]:
    from trl import GRPOTrainer

    given = inputs()
    logprobs = given["logprobs"].clone().requires_grad_()
    cispo = case.get("loss_type") == "cispo"
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    trainer = SimpleNamespace(
        loss_type=case["loss_type"],
        importance_sampling_level=case.get("importance_sampling_level", "token"),
        beta=case.get("beta", 0.0),
        epsilon_low=case.get("epsilon", 0.2),
        epsilon_high=case["epsilon_high_cispo"] if cispo else case.get("epsilon_high", 0.2),
        max_completion_length=MAX_TOKENS,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=accelerator,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, torch.zeros(SHAPE), None),
    )
    data = {
        "prompt_ids": torch.zeros(SHAPE[0], 1, dtype=torch.long),
        "prompt_mask": torch.ones(SHAPE[0], 1, dtype=torch.long),
        "completion_ids": torch.zeros(SHAPE, dtype=torch.long),
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "old_per_token_logps": None if case.get("on_policy") else given["old"],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": given["mask"].sum().float(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, data)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.tolist()


def main() -> None:
    import transformers
    import trl

    results = {name: dict(zip(("loss", "gradient"), by_trl(case), strict=True)) for name, case in CASES.items()}
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    FILE.write_text(json.dumps({"versions": versions, "cases": results}) + "\n")


if __name__ == "__main__":
    main()
