"""A process a stage against all stages in one process: real gloo processes, the same batches, the same bits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from sprawl.policy.stage import TIED
from tests.train.runtime.worker import Case, Outcome, alone, launch, outcomes

WORLD = 4
UNTIED = {"tie_word_embeddings": False}
SMALL = {"grpo": {"microbatch_rows": 3}}
CODECS = {
    "dense": {"codec": "dense"},
    "prf": {"codec": "prf", "ratio": 0.25},
    "quantized": {"codec": "quantized-prf", "ratio": 0.25},
}

EXACT = [
    *(Case(name, hf=UNTIED, sections={"boundary": boundary, **SMALL}) for name, boundary in CODECS.items()),
    Case("few-microbatches", hf=UNTIED, sections={"grpo": {"microbatch_rows": 8}}),
    Case("signs", hf=UNTIED, sections=SMALL, signs=True),
    Case(
        "inner-updates",
        hf=UNTIED,
        sections={
            "grpo": {"microbatch_rows": 3, "epochs": 2, "minibatches": 2, "kl_coef": 0.05},
            "probe": {"every": 2, "rows": 5, "gradient_every": 2},
            "boundary": {"codec": "quantized-prf", "ratio": 0.25, "dense_every": 3},
        },
    ),
    Case("token-budget", hf=UNTIED, sections={"grpo": {"microbatch_tokens": 24}}),
    Case("recomputed", hf=UNTIED, policy={"gradient_checkpointing": True}, sections=SMALL),
    Case("bfloat16", hf=UNTIED, policy={"compute_dtype": "bfloat16"}, sections=SMALL),
    Case("qwen3", hf={**UNTIED, "model_type": "qwen3"}, sections=SMALL),
    Case("refused", hf=UNTIED, sections=SMALL, broken=True),
]
TIED_CASES = [Case(f"tied-{name}", sections={"boundary": boundary, **SMALL}) for name, boundary in CODECS.items()]
REPLICAS = [
    *(
        Case(f"replicas-{name}", {"stages": 2, "replicas": 2}, UNTIED, {"boundary": boundary, **SMALL})
        for name, boundary in CODECS.items()
    ),
    Case("replicas-tied", {"stages": 2, "replicas": 2}, sections=SMALL, signs=True),
    Case("replicas-only", {"stages": 1, "replicas": 4}, sections=SMALL),
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one set of processes: starting them takes longer than the cases."""
    out = tmp_path_factory.mktemp("pipelined")
    launch(WORLD, [*EXACT, *TIED_CASES, *REPLICAS], out)
    return out


def merged(parts: list[Outcome]) -> Outcome:
    """The stages of one pipeline as one model; where two stages hold a tensor they must agree to the bit."""
    weights: dict[str, torch.Tensor] = {}
    gradients: dict[str, torch.Tensor] = {}
    codec: dict[str, torch.Tensor] = {}
    for part in parts:
        for whole, more in ((weights, part.weights), (gradients, part.gradients), (codec, part.codec)):
            for name, tensor in more.items():
                assert name not in whole or torch.equal(whole[name], tensor), name
                whole[name] = tensor
    assert all(same(part.stats, parts[0].stats) for part in parts)
    return Outcome(weights, gradients, codec, parts[0].stats)


def same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # nan equals nan


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_untied_stages_give_the_bits_of_one_process(ran: Path, case: Case) -> None:
    """Weights, gradients and codec state to the bit: every sum runs in the same order, the norm included."""
    expected, found = alone(case), merged(outcomes(case, WORLD, ran))
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        assert torch.equal(found.weights[name], tensor), name
    for name, tensor in expected.gradients.items():
        assert torch.equal(found.gradients[name], tensor), name
    assert found.codec.keys() == expected.codec.keys()
    for name, tensor in expected.codec.items():
        # fp64 sums over another order of microbatches and directions, rounded to fp32 once.
        torch.testing.assert_close(found.codec[name], tensor, rtol=1e-6, atol=1e-9)
    for one, other in zip(found.stats, expected.stats, strict=True):
        assert (one.applied, one.updates, one.clip_share) == (other.applied, other.updates, other.clip_share)
        assert one.grad_norm == other.grad_norm or math.isnan(other.grad_norm)
        assert one.wire.sent - one.wire.padding == other.wire.sent
        assert one.wire.dense == other.wire.dense
        for field in ("loss", "entropy", "kl", "kl_dense", "mismatch", "mismatch_dense", "sign_agreement"):
            close(getattr(one, field), getattr(other, field))
        if other.gradient is not None:
            assert one.gradient is not None
            for field in ("cosine", "norm_ratio", "sign_agreement", "corrected_cosine"):
                close(getattr(one.gradient, field), getattr(other.gradient, field))
        assert (one.gradient is None) == (other.gradient is None)


def close(one: float | None, other: float | None) -> None:
    """Reported means are sums of Python floats in another order."""
    assert (one is None) == (other is None)
    if one is not None and other is not None and not math.isnan(other):
        assert abs(one - other) <= 1e-9 * max(1.0, abs(other))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", TIED_CASES, ids=lambda case: case.name)
def test_tied_embeddings_stay_one_parameter(ran: Path, case: Case) -> None:
    """`merged` finds the two copies equal to the bit. Against one process the embedding's gradient is the same two sums
    (head, input) added in another order, and through the norm everything else moves with its last bit."""
    expected, found = alone(case), merged(outcomes(case, WORLD, ran))
    parts = outcomes(case, WORLD, ran)
    assert TIED in parts[0].weights
    assert TIED in parts[-1].weights
    for name, tensor in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], tensor, rtol=2e-4, atol=1e-6)
    for one, other in zip(found.stats, expected.stats, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", REPLICAS, ids=lambda case: case.name)
def test_replicas_share_a_step(ran: Path, case: Case) -> None:
    """All replicas hold the same bits. Against one process, microbatches are added in another order."""
    parts, stages = outcomes(case, WORLD, ran), case.config("multi").policy.stages
    expected = alone(case)
    pipelines = [merged(parts[first : first + stages]) for first in range(0, WORLD, stages)]
    for pipeline in pipelines[1:]:
        for name, tensor in pipelines[0].weights.items():
            assert torch.equal(pipeline.weights[name], tensor), name
        for name, tensor in pipelines[0].codec.items():
            assert torch.equal(pipeline.codec[name], tensor), name
    for name, tensor in expected.gradients.items():
        torch.testing.assert_close(pipelines[0].gradients[name], tensor, rtol=2e-4, atol=1e-6)
    for one, other in zip(pipelines[0].stats, expected.stats, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert one.wire.dense == other.wire.dense
        assert one.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-6)
