"""Compiled loops against the obvious: numpy, one element after the other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sprawl.delta import kernels
from sprawl.delta.bits import BITS, PACKED, Bits
from sprawl.delta.partition import Partition, partition_of
from sprawl.delta.survey import FAST

VIEWS = [pytest.param(bits, id=str(dtype).removeprefix("torch.")) for dtype, bits in BITS.items()]
VIEWS += [
    pytest.param(lane, id=f"{dtype}-{half}") for dtype, lanes in PACKED.items() for half, lane in enumerate(lanes)
]
SIZES = [1, 63, 64, 65, 4095, 4096, 4097, 13_000]


def words(rng: np.random.Generator, bits: Bits, size: int) -> np.ndarray:
    """Weights, mostly: normal around one magnitude, with any bit pattern now and then."""
    anything = rng.integers(0, 256, size * bits.unsigned.itemsize, np.uint8).view(bits.unsigned)
    if bits.unsigned.itemsize < 2:
        return anything
    double = rng.normal(0, 0.02, size)
    narrow = {2: np.float32, 4: np.float32, 8: np.float64}[bits.unsigned.itemsize]
    weights = double.astype(narrow).view(f"u{np.dtype(narrow).itemsize}")
    weights = (weights >> 16 if bits.unsigned.itemsize == 2 else weights).astype(bits.unsigned)
    return np.where(rng.random(size) < 0.01, anything, weights)


def partitions(rng: np.random.Generator, bits: Bits) -> Partition:
    """Every key its own class, or some of them joined."""
    starts = np.flatnonzero(rng.random(bits.keys) < rng.choice([0.1, 0.7, 1.0]))
    return Partition(tuple(sorted({0, *starts.tolist()})), bits.keys)


def ordered(codes: np.ndarray, bits: Bits) -> np.ndarray:
    return np.where(codes & bits.sign, ~codes & bits.full, codes | bits.sign) if bits.sign else codes


def slow_scan(old: np.ndarray, new: np.ndarray, bits: Bits, partition: Partition) -> dict[int, list[tuple[int, int]]]:
    """(gap, step modulo 2**width) of the changed elements of every class."""
    a, b = ((array.astype(object) >> bits.base) & bits.full for array in (old, new))
    classes = partition.class_of[((a >> bits.shift) & bits.mask).astype(np.int64)]
    found: dict[int, list[tuple[int, int]]] = {}
    for class_ in np.unique(classes).tolist():
        members = np.flatnonzero(classes == class_)
        changed = np.flatnonzero(a[members] != b[members])
        gaps = np.diff(changed, prepend=-1).tolist()
        at = members[changed]
        steps = [int(ordered(b[i], bits) - ordered(a[i], bits)) % 2 ** (8 * bits.unsigned.itemsize) for i in at]
        found[class_] = list(zip(gaps, steps, strict=True))
    return found


@pytest.mark.parametrize("bits", VIEWS)
@pytest.mark.parametrize("share", [0.0, 0.004, 0.3])
def test_scan_is_what_it_says_and_locate_its_inverse(bits: Bits, share: float) -> None:
    rng = np.random.default_rng(int(share * 1000) + bits.full % 1000 + bits.base)
    for size in SIZES:
        partition = partitions(rng, bits)
        old, other = words(rng, bits, size), words(rng, bits, size)
        new = np.where(rng.random(size) < share, other, old)
        ways, slots = (partition.class_of, partition.edges), partition.slots
        seen, last, tally = (np.zeros(slots, np.int64) for _ in range(3))
        classes, gaps = np.zeros(size, np.uint16), np.zeros(size, np.uint32)
        steps = np.zeros(size, bits.unsigned)
        at = kernels.scan(old, new, bits.form, *ways, seen, last, tally, classes, gaps, steps, 0)
        slow = slow_scan(old, new, bits, partition)
        for class_ in range(slots):
            mine = classes[:at] == class_
            pairs = list(zip(gaps[:at][mine].tolist(), steps[:at][mine].tolist(), strict=True))
            assert pairs == slow.get(class_, []), f"class {class_} of {size}"
            assert tally[class_] == len(pairs)

        order = np.argsort(classes[:at], kind="stable")
        gaps, steps = gaps[:at][order], steps[:at][order]
        end = np.cumsum(tally).astype(np.uint64)
        cursor = end - tally.astype(np.uint64)
        due = np.array([int(gaps[c]) - 1 if n else kernels.NEVER for c, n in zip(cursor.tolist(), tally, strict=True)])
        indices, values = np.zeros(at, np.uint32), np.zeros(at, bits.unsigned)
        streams = due, cursor.copy(), end, gaps, steps
        assert kernels.locate(old, bits.form, *ways, *streams, 5, indices, values) == at
        field = bits.unsigned.type(bits.full << bits.base)
        places = np.flatnonzero((old ^ new) & field)
        order = np.argsort(indices)
        assert (indices[order] == places + 5).all()
        assert (values[order] == (new[places] & field) >> bits.unsigned.type(bits.base)).all()
        if at:
            streams = due * 0, cursor.copy(), end, gaps, steps
            short = indices[: at - 1], values[: at - 1]
            assert kernels.locate(old, bits.form, *ways, *streams, 5, *short) <= at - 1


@pytest.mark.skipif(not FAST, reason="this processor has no byte look-up in 512 bits: there is one way only")
@pytest.mark.parametrize("bits", VIEWS)
def test_both_ways_to_survey_agree(bits: Bits) -> None:
    rng = np.random.default_rng(1)
    partition = partitions(rng, bits)
    tile = words(rng, bits, 4096)
    _, low, hot, edges = kernels._window(tile, bits.form, partition.class_of, partition.edges, partition.slots)
    outcomes = []
    for survey in (portable(len(hot)), kernels.survey_8 if len(hot) == 1 else kernels.survey_16):
        members, before, totals = kernels._tables(len(hot) * 8)
        outside = np.zeros(64, np.uint64)
        arguments = np.uint64(0), bits.form[1] + bits.form[3], bits.form[2], low, hot, edges
        run(survey)(tile, *arguments, members, before, totals, outside)
        outcomes.append([array.copy() for array in (members, before, totals, outside)])
    for one, other in zip(*outcomes, strict=True):
        assert (one == other).all()


def portable(eights: int):  # type: ignore[no-untyped-def]
    from sprawl.delta.survey import survey_of

    return survey_of(eights, False)


def run(survey):  # type: ignore[no-untyped-def]
    """An intrinsic as a function."""
    from numba import njit

    return njit(
        lambda tile, start, shift, mask, low, hot, edges, members, before, totals, outside: survey(
            tile, start, shift, mask, low, hot, edges, members, before, totals, outside
        )
    )


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(1, 255)))
def test_a_partition_survives_its_header(starts: set[int]) -> None:
    bits = BITS[torch.bfloat16]
    partition = Partition((0, *sorted(starts)), bits.keys)
    again = partition_of(partition.joined, bits)
    assert again == partition
    assert (np.diff(again.edges[: again.classes + 1].astype(int)) == np.bincount(again.class_of)).all()


@pytest.mark.parametrize("joined", [[[3, 3]], [[5, 4]], [[0, 256]], [[0, 5], [5, 9]], [[-1, 4]]])
def test_ranges_that_are_no_partition_are_refused(joined: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="classes"):
        partition_of(joined, BITS[torch.bfloat16])
