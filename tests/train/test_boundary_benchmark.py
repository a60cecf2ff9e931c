"""`python -m benchmarks.boundary`: the batch it samples is real, and its verdict follows the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import boundary
from benchmarks.boundary import CodecQuality, MaskCost, StepShare
from sprawl.config import load_config
from sprawl.train.codecs import PrfCodec
from sprawl.train.pipeline import StagedPolicy, pack

CONFIG = Path(__file__).parents[2] / "configs" / "tiny.yaml"


def test_sampled_batch_is_what_the_model_says_and_the_verifier_scores() -> None:
    config = load_config(CONFIG, ["rollout.prompts=4", "rollout.samples=8"])
    decoder, tokenizer = boundary.tiny_model(config)
    batch = boundary.sample_batch(config, decoder, tokenizer, 3)
    assert set(batch.rewards.tolist()) == {0.0, 1.0}  # the base answers some in the wanted format
    rows = torch.arange(batch.samples)
    packed = pack(batch.tokens, batch.prompt_lengths, batch.response_lengths, rows)
    stats = StagedPolicy(decoder, decoder.arch.split(1), torch.float32).token_stats(packed, codec=None, step=0)
    assert torch.allclose(stats.logprobs, batch.flat_logprobs(rows), atol=1e-4)
    # A dense gradient compared with itself, through a codec that keeps everything.
    dense, _, _ = boundary.gradient(
        boundary.StagedPolicy(decoder, decoder.arch.split(8), torch.float32), batch, config, None, 0
    )
    policy = StagedPolicy(decoder, decoder.arch.split(8), torch.float32)
    same, wire, _ = boundary.gradient(policy, batch, config, PrfCodec(seed=1, ratio=1.0), 1)
    assert wire.sent == wire.dense > 0
    assert boundary.compare_gradients(same, dense).cosine == pytest.approx(1.0, abs=1e-6)


def test_shares_are_measured_against_the_masks_of_a_whole_step() -> None:
    config = load_config(CONFIG, ["rollout.prompts=2", "rollout.samples=4"])
    decoder, tokenizer = boundary.tiny_model(config)
    share = boundary.tiny_share(config, boundary.sample_batch(config, decoder, tokenizer, 1), 1)
    assert share.boundaries == 7
    assert share.share == share.masks_s / share.step_s
    assert 0 < share.share < 1


@pytest.mark.parametrize(("share", "code"), [(0.01, 0), (0.2, 1)])
def test_a_missed_target_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, share: float, code: int) -> None:
    monkeypatch.setattr(boundary, "mask_costs", lambda *a: [MaskCost("cpu", 8, 2, 1.5)])
    row = StepShare("tiny", 8, 3, 100, 1.0, share, share, 0.1)
    monkeypatch.setattr(boundary, "tiny_share", lambda *a: row)
    monkeypatch.setattr(boundary, "wide_share", lambda *a: StepShare("wide", 8, 3, 100, 1.0, 0.001, 0.001, 0.05))
    monkeypatch.setattr(boundary, "codec_qualities", lambda *a: [CodecQuality("prf", 0.05, 0.1, 0.01, 30.0, 1.1)])
    result = CliRunner().invoke(boundary.boundary, ["--config", str(CONFIG), "--quick", "--json"])
    assert result.exit_code == code
    found = json.loads(result.stdout)
    assert found["shares"][0]["share"] == share
    assert found["codecs"][0]["codec"] == "prf"
    table = CliRunner().invoke(boundary.boundary, ["--config", str(CONFIG), "--quick"]).stdout
    assert f"| tiny | 8 | 3 | 100 | {share:.2%} | < 10% |" in table
