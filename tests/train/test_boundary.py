"""Boundary codecs: what crosses, what arrives, and what comes back."""

from __future__ import annotations

import pytest
import torch

from sprawl.train.codecs import DenseCodec, PrfCodec, TokenIds, WireCounter, cross
from sprawl.train.pipeline import StagedPolicy, pack
from tests.train.helpers import make_batch, make_decoder


def token_ids(rows: int, length: int) -> TokenIds:
    index = torch.arange(rows * length)
    return TokenIds(sample=index // length, position=index % length, index=index)


def test_exactly_k_channels_cross_both_ways_and_are_counted() -> None:
    codec, wire = PrfCodec(seed=3, ratio=0.05), WireCounter()
    x = torch.randn(2, 5, 128, requires_grad=True)
    y = cross(x, codec, 0, 1, token_ids(2, 5), wire)
    assert codec.keep(128) == 6
    assert bool(((y != 0).sum(-1) == 6).all())
    assert wire.sent == 2 * 5 * 6 * 4
    y.square().sum().backward()
    assert x.grad is not None
    # The gradient of the same coordinates returns, and nothing else.
    assert torch.equal(x.grad != 0, y != 0)
    assert wire.sent == 2 * (2 * 5 * 6 * 4)
    assert wire.dense == 2 * (2 * 5 * 128 * 4)


def test_report_run_keeps_77_of_1536() -> None:
    assert PrfCodec(seed=0, ratio=0.05).keep(1536) == 77


def test_kept_values_are_scaled_by_h_over_k() -> None:
    codec = PrfCodec(seed=3, ratio=0.25)
    x = torch.randn(1, 4, 32)
    y = cross(x, codec, 2, 9, token_ids(1, 4), None)
    kept = y != 0
    assert torch.equal(y[kept], x[kept] * 4)


def test_the_estimate_is_unbiased() -> None:
    """The mean over steps approaches x; five standard errors of a scaled Bernoulli."""
    codec, steps = PrfCodec(seed=5, ratio=0.25), 4000
    x = torch.randn(1, 3, 32)
    total = sum(cross(x, codec, 0, step, token_ids(1, 3), None) for step in range(steps))
    error = (total / steps - x).abs()
    deviation = x.abs() * (3 / steps) ** 0.5  # sqrt((H/k - 1) / n)
    assert bool((error < 5 * deviation + 1e-6).all())


def test_backward_is_the_adjoint_of_forward() -> None:
    codec = PrfCodec(seed=1, ratio=0.1)
    x = torch.randn(2, 3, 64, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, 64, dtype=torch.float64)
    y = cross(x, codec, 1, 4, token_ids(2, 3), None)
    (y * weight).sum().backward()
    other = torch.randn(2, 3, 64, dtype=torch.float64)
    mapped = cross(other, codec, 1, 4, token_ids(2, 3), None)
    assert torch.allclose((mapped * weight).sum(), (other * x.grad).sum())  # <A o, w> == <o, A' w>


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_dense_codec_is_bit_identical_to_no_codec(stages: int) -> None:
    decoder, batch = make_decoder(), make_batch()
    policy = StagedPolicy(decoder, decoder.arch.split(stages), torch.float32)
    packed = pack(batch.tokens, batch.prompt_lengths, batch.response_lengths, torch.arange(batch.samples))
    with_codec = policy.token_stats(packed, codec=DenseCodec(), step=1).logprobs
    without = policy.token_stats(packed, codec=None, step=1).logprobs
    assert torch.equal(with_codec, without)


def test_padding_does_not_cross() -> None:
    decoder, batch, wire = make_decoder(), make_batch(), WireCounter()
    policy = StagedPolicy(decoder, decoder.arch.split(4), torch.float32)
    packed = pack(batch.tokens, batch.prompt_lengths, batch.response_lengths, torch.arange(batch.samples))
    with torch.no_grad():
        policy.token_stats(packed, codec=PrfCodec(seed=0, ratio=0.25), step=1, wire=wire)
    real = int((batch.prompt_lengths + batch.response_lengths).sum())
    assert wire.sent == 3 * real * 8 * 4


def test_the_mask_of_a_sample_does_not_depend_on_its_microbatch() -> None:
    """Old and new log-probs are compared across different cuts of a batch: the same tokens, the same mask."""
    decoder, batch = make_decoder(), make_batch()
    policy = StagedPolicy(decoder, decoder.arch.split(4), torch.float32)
    codec = PrfCodec(seed=0, ratio=0.25)

    def logprobs(rows: torch.Tensor) -> torch.Tensor:
        packed = pack(batch.tokens, batch.prompt_lengths, batch.response_lengths, rows)
        return policy.token_stats(packed, codec=codec, step=3).logprobs

    whole = logprobs(torch.arange(batch.samples))
    parts = torch.cat([logprobs(rows) for rows in torch.arange(batch.samples).split(5)])
    assert torch.allclose(whole, parts, atol=1e-5)
