"""The entropy coder: what goes in comes out, at the size that the entropy allows, and damage does no harm."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sprawl.delta.rans import decode_values, encode_values
from sprawl.errors import IntegrityError

SIGNED = [np.int8, np.int16, np.int32, np.int64]


def round_trip(values: np.ndarray, counts: list[int]) -> bytes:
    data = encode_values(values, counts)
    again = np.zeros_like(values)
    decode_values(data, counts, again)
    assert again.tobytes() == values.tobytes()
    return data


def cut(rng: np.random.Generator, total: int, classes: int) -> list[int]:
    """Counts of `classes` classes, at least one each, that add up to `total`."""
    places = np.sort(rng.choice(np.arange(1, total), min(classes, total) - 1, replace=False))
    return np.diff([0, *places, total]).tolist()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_gaps_of_any_size(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    total, top = data.draw(st.integers(1, 700)), data.draw(st.integers(0, 32))
    values = np.maximum(rng.integers(0, 2**top, total, np.int64, endpoint=True), 1).clip(max=2**32 - 1)
    round_trip(values.astype(np.uint32), cut(rng, total, data.draw(st.integers(1, 9))))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_steps_of_any_size(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    info = np.iinfo(data.draw(st.sampled_from(SIGNED)))
    total = data.draw(st.integers(1, 700))
    values = rng.integers(info.min, info.max, total, info.dtype, endpoint=True) >> data.draw(
        st.integers(0, info.bits - 2)
    )
    values[values == 0] = data.draw(st.sampled_from([1, -1, info.min, info.max]))
    round_trip(values, cut(rng, total, data.draw(st.integers(1, 9))))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 127, 4096])
def test_one_symbol_costs_its_header_only(count: int) -> None:
    assert len(round_trip(np.full(count, 7, np.uint32), [count])) < 40
    assert len(round_trip(np.full(count, -1, np.int16), [count])) < 40


def test_extreme_skew_stays_near_the_entropy() -> None:
    rng = np.random.default_rng(0)
    values = np.where(rng.random(400_000) < 1e-3, rng.integers(2, 14, 400_000), 1).astype(np.uint32)
    share = np.unique(values, return_counts=True)[1] / values.size
    entropy = -(share * np.log2(share)).sum() * values.size / 8
    assert len(round_trip(values, [values.size])) < 1.06 * entropy + 60


def test_geometric_gaps_stay_near_the_entropy() -> None:
    rng = np.random.default_rng(0)
    for rate in (0.3, 0.02, 0.0005):
        entropy = -(rate * np.log2(rate) + (1 - rate) * np.log2(1 - rate)) / rate * 200_000 / 8
        assert len(round_trip(rng.geometric(rate, 200_000).astype(np.uint32), [200_000])) < 1.02 * entropy + 200


def test_classes_with_tables_of_their_own_and_shared() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.geometric(rate, 3000) for rate in (0.5, 0.5, 0.01, 0.4)] + [np.array([9])]
    apart = sum(len(encode_values(part.astype(np.uint32), [part.size])) for part in parts)
    values = np.concatenate(parts).astype(np.uint32)
    assert len(round_trip(values, [part.size for part in parts])) < apart


def test_damage_is_refused_or_harmless() -> None:
    """A flipped raw bit is another value, which digests catch; nothing may crash, hang or read beyond the stream."""
    rng = np.random.default_rng(0)
    for values in (rng.geometric(0.01, 300).astype(np.uint32), rng.integers(-90, 90, 300).astype(np.int16) | 1):
        data, refused = encode_values(values, [100, 200]), 0
        for place in range(len(data)):
            for bit in (0, 3, 7):
                flipped = bytearray(data)
                flipped[place] ^= 1 << bit
                try:
                    decode_values(bytes(flipped), [100, 200], np.zeros_like(values))
                except IntegrityError:
                    refused += 1
        assert refused > len(data)
        for size in range(len(data)):
            with pytest.raises(IntegrityError):
                decode_values(data[:size], [100, 200], np.zeros_like(values))
        with pytest.raises(IntegrityError):
            decode_values(data, [100, 201], np.zeros(301, values.dtype))


def test_a_gap_beyond_32_bits_is_refused() -> None:
    """A gap that wraps to 0 would never be passed."""
    wide = np.full(8, 2**32 + 1, np.int64)  # steps are coded with the same tokens: zigzag 2**33 + 1, less one
    with pytest.raises(IntegrityError):
        decode_values(encode_values(wide, [8]), [8], np.zeros(8, np.uint32))
