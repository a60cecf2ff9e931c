"""Publishing and following: the commit protocol."""

import json

import pytest
import torch

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.manifest import Manifest
from sprawl.board.reader import VersionReader
from sprawl.board.store import MemoryStore, MissingKey, Store
from sprawl.delta.state import root_digest, tensor_digests
from sprawl.errors import BoardError, FencedError, IntegrityError
from tests.board.states import FILES, RUN, publish, publisher, state_of


def root(version: int) -> str:
    return root_digest(tensor_digests(state_of(version)))


def test_every_version_is_rebuilt_bit_for_bit(store: Store) -> None:
    publish(store, 10)
    reader = VersionReader(store, RUN)
    assert reader.head() == 9
    follower = reader.materialise(0)
    for version in range(10):
        late = reader.materialise(version)
        assert late.root == root_digest(tensor_digests(late.state)) == root(version)
        reader.advance(follower, version)
        assert follower.version == version
        assert root_digest(tensor_digests(follower.state)) == root(version)
        manifest = reader.manifest(version)
        assert manifest is not None
        assert manifest.kind == ("keyframe" if version % 4 == 0 else "delta")
        assert manifest.keyframe_version == version - version % 4
    assert reader.files() == FILES
    assert reader.manifest(10) is None


def test_receipt_counts_what_was_sent() -> None:
    store = MemoryStore()
    writer = publisher(store)
    first = writer.publish(0, 0, state_of(0))
    second = writer.publish(1, 1, state_of(1), extra={"note": "x"})
    assert (first.kind, first.changed_share, first.full_bytes) == ("keyframe", 1.0, 2 * 2050 + 4)
    moved = (state_of(0)["w"] != state_of(1)["w"]).sum().item() + 1
    assert (second.kind, second.changed_share) == ("delta", moved / 2051)
    stored = {key: len(store.get(key)) for key in store.list(f"{RUN}/")}
    assert second.sent_bytes == sum(size for key, size in stored.items() if "/1/" in key or "00000001" in key)
    manifest = VersionReader(store, RUN).manifest(1)
    assert manifest is not None
    assert manifest.extra == {"note": "x"}
    assert set(manifest.tensors) == {"w", "scale"}, "a delta lists only what changed"


def test_publisher_keeps_its_own_copy() -> None:
    store = MemoryStore()
    writer = publisher(store)
    state = state_of(0)
    writer.publish(0, 0, state)
    state["w"].zero_()
    writer.publish(1, 1, state)
    assert not VersionReader(store, RUN).materialise(1).state["w"].any()
    assert VersionReader(store, RUN).materialise(0).state["w"].any()


def test_republishing_is_idempotent_and_another_state_is_refused(store: Store) -> None:
    publish(store, 6)
    before = store.list("")
    fresh = publisher(store)
    receipt = fresh.publish(5, 5, state_of(5))
    assert receipt.already_committed
    assert store.list("") == before
    with pytest.raises(IntegrityError, match="version 5") as caught:
        fresh.publish(5, 5, state_of(6))
    assert root(5) in str(caught.value)
    assert root(6) in str(caught.value)
    assert not fresh.publish(6, 6, state_of(6)).already_committed
    assert VersionReader(store, RUN).materialise(6).root == root(6)


def test_replaying_old_versions_does_not_move_the_hint_back(store: Store) -> None:
    publish(store, 6)
    publisher(store).publish(2, 2, state_of(2))
    assert json.loads(store.get(keys.latest(RUN)))["version"] == 5


@pytest.mark.parametrize("given", ["published", "other", "none"])
def test_a_restarted_publisher_resumes(store: Store, given: str) -> None:
    publish(store, 6)
    writer = publisher(store)
    state = {"published": state_of(5), "other": state_of(4), "none": None}[given]
    assert writer.resume(state, 5) == (given == "published")
    writer.publish(6, 6, state_of(6))
    assert VersionReader(store, RUN).materialise(6).root == root(6)


def test_a_gap_is_refused(store: Store) -> None:
    publish(store, 2)
    with pytest.raises(BoardError, match="no version 2"):
        publisher(store).publish(3, 3, state_of(3))


class RacingStore(MemoryStore):
    """Another writer commits `rival` just before our manifest is created."""

    rival: bytes | None = None

    def create(self, key: str, data: bytes) -> bool:
        if "/manifests/" in key and self.rival is not None:
            self.put(key, self.rival)
            self.rival = None
        return super().create(key, data)


@pytest.mark.parametrize("same", [True, False])
def test_losing_the_race_for_a_version(same: bool) -> None:
    other = MemoryStore()
    writer = publisher(other)
    writer.publish(0, 0, state_of(0))
    writer.publish(1, 1, state_of(1 if same else 2))
    store = RacingStore()
    ours = publisher(store)
    ours.publish(0, 0, state_of(0))
    store.rival = other.get(keys.manifest(RUN, 1))
    if same:
        assert ours.publish(1, 1, state_of(1)).already_committed
    else:
        with pytest.raises(IntegrityError, match="two states"):
            ours.publish(1, 1, state_of(1))


def test_a_fenced_writer_commits_nothing(store: Store) -> None:
    ledger = Ledger(store, RUN)
    old = publisher(store, epoch=ledger.acquire_epoch())
    old.publish(0, 0, state_of(0))
    new = publisher(store, epoch=ledger.acquire_epoch())
    with pytest.raises(FencedError):
        old.publish(1, 1, state_of(1))
    assert VersionReader(store, RUN).head() == 0
    new.publish(1, 1, state_of(1))


@pytest.mark.parametrize("hint", [None, b"", b"{", b'{"version": 1}', b'{"version": 999}', b'{"version": "x"}', b"[]"])
def test_head_does_not_depend_on_the_hint(store: Store, hint: bytes | None) -> None:
    assert VersionReader(store, RUN).head() is None
    publish(store, 6)
    if hint is None:
        store.delete(keys.latest(RUN))
    else:
        store.put(keys.latest(RUN), hint)
    assert VersionReader(store, RUN).head() == 5


def test_head_follows_without_listing() -> None:
    store = MemoryStore()
    writer = publisher(store)
    writer.publish(0, 0, state_of(0))
    reader = VersionReader(store, RUN)
    assert reader.head() == 0
    store.list = None  # type: ignore[assignment, method-assign]
    writer.publish(1, 1, state_of(1))
    writer.publish(2, 2, state_of(2))
    assert reader.head() == 2


def flip(store: Store, key: str) -> None:
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
@pytest.mark.parametrize("version", [0, 2])
def test_damaged_blobs_are_named_and_change_nothing(store: Store, damage: str, version: int) -> None:
    publish(store, 3)
    reader = VersionReader(store, RUN)
    served = reader.materialise(1)
    (key,) = (k for k in store.list(keys.blobs(RUN, version)) if len(store.get(k)) > 100)
    match damage:
        case "flip":
            flip(store, key)
        case "truncate":
            store.put(key, store.get(key)[:-1])
        case "empty":
            store.put(key, b"")
    with pytest.raises(IntegrityError, match=key):
        reader.materialise(2)
    if version == 2:
        with pytest.raises(IntegrityError, match=key):
            reader.advance(served, 2)
        assert root_digest(tensor_digests(served.state)) == served.root == root(1)


def test_a_manifest_that_lies_about_the_root_voids_the_state(store: Store) -> None:
    publish(store, 3)
    key = keys.manifest(RUN, 2)
    data = json.loads(store.get(key))
    data["root_digest"] = "0" * 64
    store.put(key, json.dumps(data).encode())
    reader = VersionReader(store, RUN)
    served = reader.materialise(1)
    with pytest.raises(IntegrityError, match="root digest"):
        reader.advance(served, 2)
    assert served.root == ""
    with pytest.raises(IntegrityError, match="void"):
        reader.prepare(served, 2)


def test_a_delta_is_not_applied_to_another_state(store: Store) -> None:
    """Also when the difference is in a tensor that the delta does not touch."""
    publish(store, 3)
    reader = VersionReader(store, RUN)
    served = reader.materialise(1)
    served.state["norm"] = torch.zeros(50, dtype=torch.bfloat16)
    served.digests = tensor_digests(served.state)
    served.root = root_digest(served.digests)
    with pytest.raises(IntegrityError, match="applies to version 1"):
        reader.prepare(served, 2)


def test_a_prepared_step_is_bound_to_its_base(store: Store) -> None:
    publish(store, 4)
    reader = VersionReader(store, RUN)
    served = reader.materialise(1)
    prepared = reader.prepare(served, 2)
    assert prepared.changed == ["scale", "w"]
    assert served.version == 1
    reader.commit(served, prepared)
    with pytest.raises(IntegrityError, match="prepared for version 1"):
        reader.commit(served, prepared)
    assert served.root == root(2)


def test_jump_over_several_versions_is_one_prepared_step(store: Store) -> None:
    publish(store, 10)
    reader = VersionReader(store, RUN)
    served = reader.materialise(1)
    prepared = reader.prepare(served, 9)
    assert prepared.changed == ["scale", "w"]
    reader.commit(served, prepared)
    assert served.version == 9
    assert root_digest(tensor_digests(served.state)) == root(9)


def test_a_reader_whose_chain_vanished_jumps_to_the_keyframe(store: Store) -> None:
    publish(store, 10)
    reader = VersionReader(store, RUN)
    served = reader.materialise(1)
    for version in range(8):
        store.delete(keys.manifest(RUN, version))
    reader.advance(served, 9)
    assert served.root == root(9)
    with pytest.raises(BoardError, match="no version 3: it has 8 to 9"):
        reader.materialise(3)


def test_a_blob_deleted_between_manifest_and_read(store: Store) -> None:
    publish(store, 6)
    reader = VersionReader(store, RUN)
    served = reader.materialise(3)
    manifest = reader.manifest(4)
    assert manifest is not None
    delta = manifest.blob("delta")
    assert delta is not None
    store.delete(keys.blob(RUN, 4, delta.digest))
    reader.advance(served, 4)
    assert served.root == root(4), "rebuilt from the keyframe instead"
    (lost,) = store.list(keys.blobs(RUN, 5))
    store.delete(lost)
    with pytest.raises(MissingKey, match=lost):
        reader.advance(served, 5)
    assert served.root == root(4)


def test_dtype_shape_and_names_may_change(store: Store) -> None:
    writer = publisher(store)
    states = [
        {"a": torch.ones(4), "b": torch.ones(3)},
        {"a": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(2, 2)},
        {"a": torch.ones(5, dtype=torch.bfloat16), "c": torch.zeros(2, 2)},
    ]
    reader = VersionReader(store, RUN)
    for version, state in enumerate(states):
        writer.publish(version, version, state)
    served = reader.materialise(0)
    for version in (1, 2):
        reader.advance(served, version)
        assert root_digest(tensor_digests(served.state)) == root_digest(tensor_digests(states[version]))


def test_unknown_fields_are_ignored_and_unknown_formats_refused(store: Store) -> None:
    publish(store, 1)
    key = keys.manifest(RUN, 0)
    data = json.loads(store.get(key))
    data["from_the_future"] = 1
    store.put(key, json.dumps(data).encode())
    assert VersionReader(store, RUN).materialise(0).root == root(0)
    data["format"] = 2
    store.put(key, json.dumps(data).encode())
    with pytest.raises(BoardError, match="format 2"):
        VersionReader(store, RUN).manifest(0)
    store.put(key, b"\x00")
    with pytest.raises(IntegrityError, match=key):
        VersionReader(store, RUN).manifest(0)


def test_canonical_bytes_survive_a_round_trip(store: Store) -> None:
    publish(store, 2)
    for version in range(2):
        key = keys.manifest(RUN, version)
        assert Manifest.from_bytes(store.get(key), key).to_bytes() == store.get(key)


def test_a_manifest_copied_from_another_place_is_refused(store: Store) -> None:
    publish(store, 2)
    store.put(keys.manifest(RUN, 2), store.get(keys.manifest(RUN, 1)))
    with pytest.raises(IntegrityError, match="version 1"):
        VersionReader(store, RUN).manifest(2)
