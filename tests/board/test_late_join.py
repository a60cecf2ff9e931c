"""Late joiners: the planner, merged deltas, and jumps that touch nothing until they commit."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sprawl.board import keys
from sprawl.board.manifest import DELTA, KEYFRAME
from sprawl.board.merged import merge, read_merged
from sprawl.board.reader import VersionReader
from sprawl.board.retention import gc
from sprawl.board.routes import Hop, find, hop_seconds, plan
from sprawl.board.store import MemoryStore, MissingKey, Store
from sprawl.board.verify import verify_board
from sprawl.delta.state import State, root_digest, tensor_digests
from sprawl.errors import BoardError, IntegrityError
from tests.board.states import RUN, publish, publisher, state_of


def root(version: int) -> str:
    return root_digest(tensor_digests(state_of(version)))


def cheapest(hops: list[Hop], start: int | None, target: int, full: int) -> float | None:
    """By trying every path."""
    best = 0.0 if start == target else None
    for hop in hops:
        if hop.version == target:
            rest = 0.0 if hop.base is None else cheapest(hops, start, hop.base, full) if hop.base != start else 0.0
            if rest is not None:
                cost = rest + hop_seconds(hop.bytes, full)
                best = cost if best is None else min(best, cost)
    return best


@given(st.data())
def test_the_planner_finds_the_cheapest_route(data: st.DataObject) -> None:
    versions = 6
    pairs = [(base, version) for base, version in itertools.combinations(range(versions), 2)]
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True))
    keyframes = data.draw(st.lists(st.sampled_from(range(versions)), unique=True))
    size = st.integers(0, 10**9)
    hops = [Hop(DELTA, base, version, data.draw(size)) for base, version in chosen]
    hops += [Hop(KEYFRAME, None, version, data.draw(size)) for version in keyframes]
    start = data.draw(st.sampled_from([None, *range(versions - 1)]))
    full = data.draw(st.integers(0, 10**9))
    route = plan(hops, start, versions - 1, full)
    expected = cheapest(hops, start, versions - 1, full)
    assert (route is None) == (expected is None)
    if route is not None and expected is not None:
        assert route.seconds == pytest.approx(expected)
        at: int | None = start
        for hop in route.hops:
            assert hop.kind == KEYFRAME or hop.base == at
            at = hop.version
        assert at == versions - 1


def test_a_joiner_takes_what_is_cheapest() -> None:
    store = MemoryStore()
    writer = publisher(store, keyframe_every=5)
    generator = torch.Generator().manual_seed(0)
    state = {"w": torch.randn(400_000, generator=generator).bfloat16()}
    for version in range(12):
        writer.publish(version, version, state)
        state["w"][torch.randint(0, 40_000, (300,), generator=generator)] *= 1.01
    reader = VersionReader(store, RUN)
    assert [(h.kind, h.version) for h in find(reader, None, 11, set()).hops] == [(KEYFRAME, 10), (DELTA, 11)]
    away = find(reader, 1, 11, set())
    assert [(h.base, h.version) for h in away.hops] == [(None, 10), (10, 11)], "instead of ten passes"
    short = find(reader, 6, 11, set())
    assert [(h.base, h.version) for h in short.hops] == [(v, v + 1) for v in range(6, 11)], "deltas are small here"
    record = merge(reader, 1, 11)
    assert record.chain_bytes == sum(reader.require(version).bytes_of(DELTA) for version in range(2, 12))
    assert record.bytes < record.chain_bytes
    assert [(h.base, h.version) for h in find(reader, 1, 11, set()).hops] == [(1, 11)]
    assert [(h.base, h.version) for h in find(reader, 0, 11, set()).hops] == [(0, 1), (1, 11)]


@pytest.mark.parametrize("merged", [False, True])
def test_a_jump_touches_nothing_until_it_commits(store: Store, merged: bool) -> None:
    publish(store, 10, keyframe_every=100)
    reader = VersionReader(store, RUN)
    if merged:
        merge(reader, 2, 9)
    served = reader.materialise(2)
    prepared = reader.prepare(served, 9)
    assert root_digest(tensor_digests(served.state)) == served.root == root(2)
    assert prepared.changed == ["scale", "w"]
    assert set(prepared.overwrites.patches) == {"w"}, "patches, not whole tensors"
    reader.check(served, prepared)
    reader.commit(served, prepared)
    assert served.root == root_digest(tensor_digests(served.state)) == root(9)


def test_merging_is_exact_over_changes_of_form(store: Store) -> None:
    states: list[State] = [
        {"a": torch.ones(4), "b": torch.ones(3), "same": torch.ones(2)},
        {"a": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(2, 2), "same": torch.ones(2)},
        {"a": torch.ones(5, dtype=torch.bfloat16), "c": torch.zeros(2, 2), "b": torch.zeros(3), "same": torch.ones(2)},
        {"a": torch.zeros(5, dtype=torch.bfloat16), "c": torch.zeros(2, 2), "same": torch.ones(2)},
    ]
    writer = publisher(store, keyframe_every=100)
    for version, state in enumerate(states):
        writer.publish(version, version, state)
    reader = VersionReader(store, RUN)
    for base, version in itertools.combinations(range(4), 2):
        if version - base > 1:
            record = merge(reader, base, version)
            assert merge(reader, base, version) == record, "merging again finds it"
            served = reader.materialise(base)
            reader.commit(served, reader.prepare_merged(served, record))
            assert served.root == root_digest(tensor_digests(states[version]))
            assert set(served.state) == set(states[version])
    report = verify_board(store, RUN)
    assert report.ok, report.problems
    assert report.merged == 3


@pytest.mark.parametrize("damage", ["flip", "delete", "record", "lies"])
def test_a_lost_or_damaged_short_cut_is_driven_around(store: Store, damage: str) -> None:
    publish(store, 9, keyframe_every=100)
    reader = VersionReader(store, RUN)
    record = merge(reader, 1, 8)
    blob, name = keys.merged_blob(RUN, 1, 8, record.blobs[0].digest), keys.merged(RUN, 1, 8)
    match damage:
        case "flip":
            store.put(blob, store.get(blob)[:-1] + b"?")
        case "delete":
            store.delete(blob)
        case "record":
            store.put(name, b"{}")
        case "lies":
            store.put(name, record.model_copy(update={"root_digest": "0" * 64}).model_dump_json().encode())
    served = reader.materialise(1)
    reader.commit(served, reader.prepare(served, 8))
    assert served.root == root(8)
    if damage in ("flip", "lies"):
        problems = verify_board(store, RUN).problems
        assert any("merged delta 1-8" in problem for problem in problems), problems


def test_a_merged_delta_is_only_for_its_base(store: Store) -> None:
    publish(store, 6, keyframe_every=100)
    reader = VersionReader(store, RUN)
    record = merge(reader, 1, 5)
    with pytest.raises(IntegrityError, match="starts at version 1, not at 2"):
        reader.prepare_merged(reader.materialise(2), record)
    served = reader.materialise(1)
    served.root = "0" * 64
    with pytest.raises(IntegrityError, match="applies to version 1 with root digest"):
        reader.prepare_merged(served, record)
    store.put(keys.merged(RUN, 2, 5), record.model_dump_json().encode())
    with pytest.raises(IntegrityError, match="is the record of 1-5"):
        read_merged(reader, 2, 5)
    with pytest.raises(BoardError, match="cannot merge from version 3 to 3"):
        merge(reader, 3, 3)


def test_a_keyframe_that_is_lost_is_rebuilt_from_the_one_before(store: Store) -> None:
    publish(store, 10, keyframe_every=4)
    reader = VersionReader(store, RUN)
    (keyframe,) = (e for e in reader.require(8).parts(KEYFRAME))
    store.delete(keys.blob(RUN, 8, keyframe.digest))
    assert reader.materialise(9).root == root(9)
    for version in (0, 4):
        (entry,) = reader.require(version).parts(KEYFRAME)
        store.delete(keys.blob(RUN, version, entry.digest))
    with pytest.raises(MissingKey):
        reader.materialise(9)


def test_retention_keeps_merged_deltas_to_versions_that_stay(store: Store) -> None:
    publish(store, 10, keyframe_every=4)
    reader = VersionReader(store, RUN)
    merge(reader, 0, 3)
    merge(reader, 0, 9)
    base = reader.materialise(0)
    gc(store, RUN, 1)
    assert reader.versions() == [8, 9]
    assert read_merged(reader, 0, 3) is None
    assert [key for key in store.list(keys.merged_root(RUN)) if "-00000003" in key] == []
    reader.commit(base, reader.prepare(base, 9))
    assert base.root == root(9), "a joiner that holds the base model needs nothing else"
