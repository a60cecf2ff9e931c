"""The keyed mask: exact, reproducible, uniform."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from sprawl.train import prf
from sprawl.train.codecs import PrfCodec, TokenIds


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count) // 16, torch.arange(count) % 16


def test_golden_vectors() -> None:
    """Fixed for all time: both ends of a link, of whatever release, must derive these."""
    assert prf.mix(1) == 0x5692161D100B05E5
    assert prf.derive_key(7, 3, 11) == 0x1431F28CDCBF48A9
    sample, position = tokens(40)
    kept = prf.channels(prf.derive_key(7, 3, 11), sample, position, 128, 6)
    assert kept[0].tolist() == [8, 14, 26, 51, 94, 125]
    assert kept[39].tolist() == [30, 51, 80, 87, 93, 112]


GOLDEN = {
    (128, 6): "8d65f6c4c3e4359114f0fedfac3dda15",
    (1536, 77): "679485f89ccbd03ff21d68e02d2a724d",
    (1536, 352): "ec8413038cce04faf5d485644248d92a",
    (4096, 205): "7549e1af52886bc2fb8ec4a551fd1394",
}


def digest(kept: torch.Tensor) -> str:
    return blake3(kept.numpy().astype("<i8").tobytes()).hexdigest()[:32]


def many_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(4096) // 64, torch.arange(4096) % 64


@pytest.mark.parametrize(("channels", "keep"), GOLDEN)
def test_golden_digests_of_whole_batches(channels: int, keep: int) -> None:
    """4096 tokens at the widths of real runs."""
    kept = prf.channels(prf.derive_key(7, 3, 11), *many_tokens(), channels, keep)
    assert digest(kept) == GOLDEN[channels, keep]


def test_the_mask_is_the_same_from_any_thread_under_any_thread_count() -> None:
    before = torch.get_num_threads()
    key = prf.derive_key(7, 3, 11)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert digest(prf.reference_channels(key, *many_tokens(), 128, 6)) == GOLDEN[128, 6]
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(lambda _: digest(prf.channels(key, *many_tokens(), 128, 6)), range(8)))
            assert set(found) == {GOLDEN[128, 6]}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_channels_that_cross_do_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    sample, position = many_tokens()
    ids = TokenIds(sample=sample, position=position, index=torch.arange(4096))
    codec = PrfCodec(seed=7, ratio=0.05)
    x = torch.ones(4096, 128, dtype=dtype)
    arrived = codec.receive(codec.send(x, 3, 11, ids), 128, 3, 11, ids)
    assert arrived.dtype == dtype
    assert digest(arrived.nonzero()[:, 1].view(4096, 6)) == GOLDEN[128, 6]


def test_more_channels_than_the_guess_expects_are_found_all_the_same() -> None:
    """The threshold before the selection is a guess; where it is too strict, all scores are looked at."""
    sample, position = torch.arange(3000), torch.zeros(3000, dtype=torch.int64)
    for keep in (1, 2, 63, 64):
        fast = prf.channels(9, sample, position, 64, keep)
        assert torch.equal(fast, prf.reference_channels(9, sample, position, 64, keep))


@settings(deadline=None)  # compiled at the first call
@given(
    key=st.integers(0, 2**64 - 1),
    channels=st.integers(1, 300),
    share=st.floats(0.01, 1.0),
    offset=st.integers(0, 2**40),
)
def test_compiled_loop_equals_reference(key: int, channels: int, share: float, offset: int) -> None:
    keep = max(1, round(share * channels))
    sample, position = tokens(33)
    fast = prf.channels(key, sample + offset, position, channels, keep)
    slow = prf.reference_channels(key, sample + offset, position, channels, keep)
    assert torch.equal(fast, slow)
    assert fast.shape == (33, keep)
    assert bool((fast[:, 1:] > fast[:, :-1]).all())  # distinct and ascending
    assert int(fast.min()) >= 0
    assert int(fast.max()) < channels


def test_every_channel_is_kept_equally_often() -> None:
    count, channels, keep = 20_000, 128, 6
    sample, position = tokens(count)
    kept = prf.channels(prf.derive_key(1, 0, 1), sample, position, channels, keep)
    observed = torch.bincount(kept.flatten(), minlength=channels).double()
    expected = count * keep / channels
    # Sampling without replacement: the variance of an inclusion is p (1 - p), and counts are negatively correlated.
    statistic = float(((observed - expected) ** 2 / (expected * (1 - keep / channels))).sum())
    spread = math.sqrt(2 * (channels - 1))
    assert abs(statistic - (channels - 1)) < 5 * spread


@pytest.mark.parametrize("other", [(2, 0, 1), (1, 1, 1), (1, 0, 2)], ids=["seed", "layer", "step"])
def test_masks_of_other_keys_are_independent(other: tuple[int, int, int]) -> None:
    """Overlap of two masks is hypergeometric: mean k*k/H."""
    count, channels, keep = 20_000, 128, 6
    sample, position = tokens(count)
    first = torch.zeros(count, channels).scatter(
        1, prf.channels(prf.derive_key(1, 0, 1), sample, position, channels, keep), 1
    )
    second = torch.zeros(count, channels).scatter(
        1, prf.channels(prf.derive_key(*other), sample, position, channels, keep), 1
    )
    overlap = float((first * second).sum(1).mean())
    mean = keep * keep / channels
    deviation = math.sqrt(mean * (1 - keep / channels) * (channels - keep) / (channels - 1) / count)
    assert abs(overlap - mean) < 5 * deviation


def test_keep_outside_range_is_refused() -> None:
    sample, position = tokens(2)
    for keep in (0, 9):
        with pytest.raises(ValueError, match="between 1 and 8"):
            prf.channels(0, sample, position, 8, keep)
