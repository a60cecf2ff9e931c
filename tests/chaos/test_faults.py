"""Faults that version paths of other projects had, or that stores have, and what happens here.

| fault | immune because | test |
|---|---|---|
| 1 a restarted trainer uses a version number again | one number, one root digest; creation is exclusive | test_a_reused_version_number_is_refused, tests/interop::test_a_number_used_again_is_refused, tests/board/test_local_copy::test_a_version_number_used_again_is_noticed |
| 2 index not visible yet: a delta taken for a full version | the kind is in the manifest; no manifest, no version | test_a_version_without_its_manifest_is_not_there, tests/interop::test_a_missing_index_is_not_a_full_version |
| 3 index there, shard missing: marked applied | every blob is named, sized and hashed | test_a_missing_blob_is_never_an_empty_delta, tests/interop::test_a_missing_shard_is_not_an_empty_delta |
| 4 another base in a tensor that the delta does not touch | the base's root digest covers all tensors | tests/board/test_versions::test_a_delta_is_not_applied_to_another_state |
| 5 crash between apply and marker reverts an XOR | overwrites; a journal that is replayed | tests/chaos/test_kills_file::test_appliers, ::test_appliers_killed_while_they_recover |
| 6 a tensor in two shards cancels out | one owner a tensor, checked by writer and reader | tests/board/test_parts::test_a_tensor_with_two_owners_is_refused, test_two_parts_with_one_tensor_are_refused_by_the_reader, tests/interop::test_a_tensor_in_two_shards_does_not_cancel_out |
| 7 flips of -0.0 and +0.0, 8 NaN payloads, 10 zero-dim, empty | bits are compared and moved, never values | test_any_chain_of_states_arrives_by_every_route |
| 9 byte positions wrap at 4 GiB | element indices; refused where a foreign format would wrap | test_offsets_beyond_4_gib, tests/interop::test_positions_beyond_4_gib_are_refused_not_wrapped |
| 11 tied lm_head absent from the base | one name, one tensor; refused before anything is committed | test_tied_tensors_are_refused_before_the_commit, tests/interop::test_a_tied_tensor_that_the_base_lacks_is_named |
| 12 the sender's snapshot runs ahead | the base moves only after the commit | test_a_failed_publish_does_not_move_the_base |
| 13 a keyframe omits unchanged tensors | its root digest is that of the whole state | test_any_chain_of_states_arrives_by_every_route (verify compares chain and keyframe) |
| 14 retention deletes before a reader loads | live islands hold their chain; a slow reader is sent on | test_retention_under_a_slow_reader, tests/board/test_retention |
| 15 left-over shards of another world size | a manifest names its blobs, nothing is listed | tests/board/test_parts::test_the_world_size_may_change_and_ranks_may_restart, tests/interop::test_left_over_shards_are_ignored |
| 19 dtype, shape or name changes between versions | such tensors are sent whole, gone ones removed | test_any_chain_of_states_arrives_by_every_route |
| 20 a state file cut short by a crash | temporary file, sync, rename; torn ones are refused | tests/chaos/test_kills_file, tests/board/test_local_copy::test_a_damaged_copy_is_named_and_replaced |
| 21 a cache serves the old object of the same size | content addresses; digests | test_a_cache_that_serves_stale_objects |
| listings that lag | never listed on the hot path; only ever behind | test_stale_listings |
| truncated and flipped blobs | digest before use | tests/board/test_versions::test_damaged_blobs_are_named_and_change_nothing |
| racing publishers | exclusive creation | test_twenty_racing_publishers, tests/chaos/test_kills_s3::test_twenty_racing_publishers_have_one_winner |
| kill -9 anywhere | blobs first, one commit point | tests/chaos/test_kills_file, tests/chaos/test_kills_s3 |

16-18, 22-25 concern engines and sidecars: tests/rollout.
"""  # noqa: E501

import json
import mmap
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sprawl.board import keys
from sprawl.board.commit import CommitOptions
from sprawl.board.ledger import Ledger
from sprawl.board.local_copy import LocalCopy, map_weights, pull
from sprawl.board.manifest import DELTA
from sprawl.board.merged import merge
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.records import IslandRecord
from sprawl.board.retention import gc
from sprawl.board.store import Keys, MemoryStore, MissingKey, Store, open_store
from sprawl.board.verify import verify_board
from sprawl.delta.bits import integer_view
from sprawl.delta.codec import Overwrites, apply
from sprawl.delta.segment import Patch
from sprawl.delta.state import root_digest, tensor_digests
from sprawl.errors import BoardError, IntegrityError, SprawlError
from tests.chaos.killing import run
from tests.chaos.scenes import RUN, publish, root, state_of
from tests.delta.random_states import first, successor
from tests.forking import context


def published(versions: int) -> MemoryStore:
    store = MemoryStore("chaos")
    for version in range(versions):
        publish(store, version)
    return store


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 4))
def test_any_chain_of_states_arrives_by_every_route(seed: int, steps: int, every: int) -> None:
    rng = np.random.default_rng(seed)
    states = [first(rng)]
    for _ in range(steps):
        states.append(successor(rng, states[-1]))
    store = MemoryStore("property")
    writer = Publisher(store, RUN, CommitOptions(keyframe_every=every, dtype="mixed"))
    for version, state in enumerate(states):
        writer.publish(version, version, state)
    roots = [root_digest(tensor_digests(state)) for state in states]
    reader = VersionReader(store, RUN)
    follower = reader.materialise(0)
    jumper = reader.materialise(0)
    for version in range(1, steps + 1):
        reader.advance(follower, version)
        assert follower.root == roots[version] == reader.materialise(version).root
    reader.commit(jumper, reader.prepare(jumper, steps))
    assert jumper.root == roots[-1] == root_digest(tensor_digests(jumper.state))
    if steps > 1:
        merged = reader.materialise(0)
        reader.commit(merged, reader.prepare_merged(merged, merge(reader, 0, steps)))
        assert merged.root == roots[-1]
    report = verify_board(store, RUN)
    assert report.ok, report.problems


def test_a_reused_version_number_is_refused() -> None:
    """The trainer restarts, knows nothing, and counts from 1 again with other weights."""
    store = published(3)
    before = {key: store.get(key) for key in store.list("")}
    restarted = Publisher(store, RUN, CommitOptions(keyframe_every=4, dtype="bfloat16"))
    with pytest.raises(IntegrityError, match=r"version 1 .*root digest .*never mean two states"):
        restarted.publish(1, 1, state_of(5))
    after = {key: store.get(key) for key in store.list("")}
    assert after == before


def test_a_version_without_its_manifest_is_not_there() -> None:
    store = published(3)
    store.delete(keys.manifest(RUN, 2))
    reader = VersionReader(store, RUN)
    assert reader.head() == 1
    with pytest.raises(BoardError, match="no version 2: it has 0 to 1"):
        reader.materialise(2)


def test_a_missing_blob_is_never_an_empty_delta() -> None:
    store = published(3)
    reader = VersionReader(store, RUN)
    served = reader.materialise(1)
    (blob,) = reader.require(2).parts(DELTA)
    store.delete(keys.blob(RUN, 2, blob.digest))
    with pytest.raises(MissingKey, match=blob.digest):
        reader.advance(served, 2)
    assert (served.version, served.root) == (1, root(1))
    assert root_digest(tensor_digests(served.state)) == root(1)


def test_two_parts_with_one_tensor_are_refused_by_the_reader() -> None:
    """Should a foreign writer commit such a thing."""
    store = published(3)
    manifest = VersionReader(store, RUN).require(2)
    twice = manifest.model_copy(update={"blobs": [*manifest.blobs, *manifest.parts(DELTA)]})
    store.put(keys.manifest(RUN, 2), twice.to_bytes())
    reader = VersionReader(store, RUN)
    served = reader.materialise(1)
    with pytest.raises(IntegrityError, match=r"00000002\.json: tensor 'a' is in the parts of two writers"):
        reader.advance(served, 2)
    assert served.root == root(1)


def test_offsets_beyond_4_gib(tmp_path: Path) -> None:
    """A sparse file, a tensor behind 5 GiB of another: the patch lands where it should, nowhere else."""
    gap, count = 5 << 30, 1000
    header = {
        "far": {"dtype": "BF16", "shape": [count], "data_offsets": [gap, gap + 2 * count]},
        "wide": {"dtype": "BF16", "shape": [gap // 2], "data_offsets": [0, gap]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + gap + 2 * count)
    state, mapped = map_weights(path)
    assert state["wide"].numel() == gap // 2 > 1 << 31
    last = state["wide"].numel() - 1
    apply(
        state,
        Overwrites(
            {
                "far": Patch(np.array([7], np.uint32), np.array([0x4049], np.uint16)),
                "wide": Patch(np.array([1 << 31, last], np.uint32), np.array([1, 2], np.uint16)),
            }
        ),
    )
    mapped.flush()
    start = 8 + len(text)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        assert view[start + gap + 14 : start + gap + 16] == b"\x49\x40"
        assert view[start + (1 << 32) : start + (1 << 32) + 2] == b"\x01\x00"
        assert view[start + gap - 2 : start + gap] == b"\x02\x00"
        assert view[start : start + 4] == bytes(4), "no position wrapped around"
    assert integer_view(state["far"]).sum() == 0x4049


def test_tied_tensors_are_refused_before_the_commit() -> None:
    store = MemoryStore("tied")
    shared = torch.ones(4)
    with pytest.raises(SprawlError, match="share memory"):
        Publisher(store, RUN, CommitOptions(keyframe_every=1, dtype="float32")).publish(
            0, 0, {"embed": shared, "lm_head": shared}
        )
    assert VersionReader(store, RUN).head() is None


class Failing(MemoryStore):
    """Fails at the n-th write."""

    left = 10**9

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise BoardError("board memory://failing: the disk is full")

    def put(self, key: str, data: bytes) -> None:
        self._count()
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._count()
        return super().create(key, data)


@pytest.mark.parametrize("writes", range(3))
def test_a_failed_publish_does_not_move_the_base(writes: int) -> None:
    store = Failing("failing")
    writer = Publisher(store, RUN, CommitOptions(keyframe_every=10, dtype="bfloat16"))
    writer.publish(0, 0, state_of(0))
    writer.publish(1, 1, state_of(1))
    store.left = writes
    with pytest.raises(BoardError, match="disk is full"):
        writer.publish(2, 2, state_of(2))
    store.left = 10**9
    writer.publish(2, 2, state_of(2))
    writer.publish(3, 3, state_of(3))
    assert verify_board(store, RUN).ok
    assert VersionReader(store, RUN).materialise(3).root == root(3)


class Interrupted(MemoryStore):
    """Does something just before the n-th read of a blob."""

    before_blob: Callable[[], None] | None = None

    def get(self, key: str) -> bytes:
        if "/blobs/" in key and self.before_blob is not None:
            action, self.before_blob = self.before_blob, None
            action()
        return super().get(key)


def test_retention_under_a_slow_reader(tmp_path: Path) -> None:
    store = Interrupted("slow")
    for version in range(7):
        publish(store, version)
    reader = VersionReader(store, RUN)

    def clean() -> None:
        for version in (7, 8, 9):
            publish(store, version)
        gc(store, RUN, 1)

    # A joiner: what it was told of is gone while it reads; the newest version is there.
    store.before_blob = clean
    with pytest.raises(BoardError):
        reader.materialise(3)
    head = reader.head()
    assert head == 9
    assert reader.materialise(head).root == root(9)

    # A follower that is not registered finds its chain gone, and jumps.
    follower = VersionReader(published(5), RUN).materialise(4)
    reader.advance(follower, 9)
    assert follower.root == root(9)

    # One that is registered keeps its chain.
    again = Interrupted("kept")
    for version in range(7):
        publish(again, version)
    Ledger(again, RUN).heartbeat(
        IslandRecord(island_id="i", url="u", state="ready", applied=5, started_at=0.0, heartbeat_at=4e9, interval_s=1e9)
    )
    held = VersionReader(again, RUN)
    served = held.materialise(5)
    again.before_blob = lambda: gc(again, RUN, 1) and None
    held.advance(served, 6)
    assert served.root == root(6)
    assert held.versions() == [4, 5, 6]

    # A copy on disk whose version is long gone goes on from where it is.
    pull(VersionReader(published(3), RUN), tmp_path, 2)
    pull(reader, tmp_path, 9)
    copy = LocalCopy.open(tmp_path)
    assert copy is not None
    assert copy.served.root == root(9)


class StaleCache(MemoryStore):
    """A cache in front of a store that keeps serving what it has while the size is the same (or at all)."""

    def __init__(self, inner: Store) -> None:
        super().__init__("cache")
        self.inner = inner
        self.cached: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        fresh = self.inner.get(key)
        held = self.cached.setdefault(key, fresh)
        return held if len(held) == len(fresh) else fresh

    def exists(self, key: str) -> bool:
        return self.inner.exists(key)

    def list(self, prefix: str) -> Keys:
        return self.inner.list(prefix)


def test_a_cache_that_serves_stale_objects() -> None:
    inner = published(3)
    cache = StaleCache(inner)
    reader = VersionReader(cache, RUN)
    served = reader.materialise(2)
    assert reader.head() == 2
    for version in (3, 4, 5):
        publish(inner, version)
    assert reader.head() == 5, "the hint may be stale, the chain of manifests is followed"
    reader.advance(served, 5)
    assert served.root == root(5)
    # The prefix is emptied and used again by another run: its manifests and deltas have the same keys and sizes.
    second = MemoryStore("second")
    writer = Publisher(second, RUN, CommitOptions(keyframe_every=4, dtype="bfloat16"))
    for version in range(7):
        writer.publish(version, version, {**state_of(version), "still": torch.zeros(300, dtype=torch.bfloat16)})
    cache.inner = second
    with pytest.raises(IntegrityError, match=r"version 6 applies to version 5 with root digest"):
        reader.advance(served, 6)
    assert served.root == root_digest(tensor_digests(served.state)) == root(5), "the old run's state, not a mixture"


class Lagging(MemoryStore):
    """Listings show what was there when `freeze` was called; reads are current."""

    frozen: Keys | None = None

    def freeze(self) -> None:
        self.frozen = super().list("")

    def list(self, prefix: str) -> Keys:
        return super().list(prefix) if self.frozen is None else [k for k in self.frozen if k.startswith(prefix)]


def test_stale_listings() -> None:
    store = Lagging("lagging")
    for version in range(5):
        publish(store, version)
    store.freeze()
    for version in range(5, 9):
        publish(store, version)
    store.delete(keys.latest(RUN))
    reader = VersionReader(store, RUN)
    assert reader.head() == 8, "found from the last one listed on"
    assert reader.materialise(8).root == root(8)
    plan = gc(store, RUN, 1).plan
    assert plan.keep_from == 4, "retention that sees the past deletes less, never more"
    assert reader.materialise(8).root == root(8)
    store.frozen = None
    gc(store, RUN, 1)
    store.freeze()
    for version in (9, 10):
        publish(store, version)
    (gone,) = (key for key in store.list(keys.manifests(RUN)) if key.endswith("08.json"))
    store.delete(gone)
    assert VersionReader(store, RUN).head() == 10, "a listing that still shows what is gone"


def _race(board: str, name: str, value: float, start: Barrier) -> None:
    """Exit code 0 when this process's state is the version, 3 when another's is."""
    writer = Publisher(open_store(board), RUN, CommitOptions(keyframe_every=4, dtype="bfloat16", writer=name))
    writer.resume(None, 0)
    start.wait(60)
    try:
        writer.publish(1, 1, {**state_of(1), "mine": torch.tensor(value)})
    except IntegrityError:
        raise SystemExit(3) from None


@pytest.mark.slow
@pytest.mark.parametrize("same", [False, True])
def test_twenty_racing_publishers(tmp_path: Path, same: bool) -> None:
    """Processes, one version. Different states: one wins. The same state: it is published once, all agree."""
    board = str(tmp_path / "board")
    store = open_store(board, create=True)
    publish(store, 0)
    start = context().Barrier(20)
    with ThreadPoolExecutor(20) as pool:
        codes = list(pool.map(lambda i: run(_race, board, f"w{i}", 0.0 if same else float(i), start), range(20)))
    assert codes.count(0) == (20 if same else 1)
    assert set(codes) <= {0, 3}
    served = VersionReader(store, RUN).materialise(1)
    assert served.state["mine"].item() == (0.0 if same else codes.index(0))
    assert verify_board(store, RUN).ok
    assert [path.name for path in Path(board).rglob(".tmp*")] == []


def test_the_old_state_stays_whatever_arrives(tmp_path: Path) -> None:
    """A copy on disk survives a manifest that lies, a delta for another base and one that is cut short."""
    store = published(3)
    reader = VersionReader(store, RUN)
    pull(reader, tmp_path, 1)
    manifest = reader.require(2)
    before = (tmp_path / "model.safetensors").read_bytes()
    (blob,) = manifest.parts(DELTA)
    key = keys.blob(RUN, 2, blob.digest)
    data = store.get(key)
    for broken, change in (
        (manifest.model_copy(update={"root_digest": "0" * 64}), data),
        (manifest.model_copy(update={"base_root_digest": "0" * 64}), data),
        (manifest, data[:-1]),
        (manifest, data[:-1] + bytes([data[-1] ^ 1])),
    ):
        store.put(keys.manifest(RUN, 2), broken.to_bytes())
        store.put(key, change)
        with pytest.raises(IntegrityError, match=r"version 2|blobs/2"):
            pull(reader, tmp_path, 2)
        assert (tmp_path / "model.safetensors").read_bytes() == before
    store.put(keys.manifest(RUN, 2), manifest.to_bytes())
    store.put(key, data)
    pull(reader, tmp_path, 2)
