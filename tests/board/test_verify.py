import json

import pytest

from sprawl.board import keys
from sprawl.board.manifest import KEYFRAME
from sprawl.board.reader import VersionReader
from sprawl.board.store import MemoryStore, Store
from sprawl.board.verify import verify_board
from sprawl.delta.codec import encode_whole
from sprawl.errors import BoardError
from tests.board.states import RUN, publish, state_of


def test_a_clean_board(store: Store) -> None:
    publish(store, 10)
    seen: list[tuple[int, int]] = []
    report = verify_board(store, RUN, lambda done, total: seen.append((done, total)))
    assert report.ok
    assert (report.published, report.versions, report.keyframes) == (10, 10, 3)
    assert report.bytes_read == sum(len(store.get(key)) for key in store.list(f"{RUN}/blobs/"))
    assert seen[-1] == (10, 10)
    with pytest.raises(BoardError, match="published no version"):
        verify_board(store, "other")


def test_damage_is_named_and_the_check_goes_on_at_the_next_keyframe(store: Store) -> None:
    publish(store, 10)
    (key,) = store.list(keys.blobs(RUN, 5))
    store.put(key, store.get(key)[::-1])
    report = verify_board(store, RUN)
    assert not report.ok
    assert report.versions == 7
    assert key in report.problems[0]
    assert [problem.split(":")[0] for problem in report.problems] == ["version 5", "version 6", "version 7"]


def test_a_missing_version_is_reported(store: Store) -> None:
    publish(store, 6)
    store.delete(keys.manifest(RUN, 2))
    report = verify_board(store, RUN)
    assert report.problems[0].startswith("version 2 is missing")
    assert not report.ok


def test_a_keyframe_that_is_another_state_than_the_chain_is_found() -> None:
    """The whole state and its digests agree with each other, but not with where the deltas lead."""
    store = MemoryStore()
    publish(store, 5)
    other = MemoryStore()
    publish(other, 7, keyframe_every=6)
    foreign = VersionReader(other, RUN).manifest(6)
    manifest = VersionReader(store, RUN).manifest(4)
    assert manifest is not None
    assert foreign is not None
    whole = encode_whole(state_of(6))
    entry = foreign.blob(KEYFRAME)
    assert entry is not None
    store.put(keys.blob(RUN, 4, entry.digest), whole)
    data = json.loads(manifest.to_bytes())
    data["blobs"] = [entry.model_dump() if blob["role"] == KEYFRAME else blob for blob in data["blobs"]]
    data["root_digest"] = foreign.root_digest
    store.put(keys.manifest(RUN, 4), json.dumps(data).encode())
    assert VersionReader(store, RUN).materialise(4).root == foreign.root_digest, "a late joiner is none the wiser"
    report = verify_board(store, RUN)
    assert [problem.split(":")[0] for problem in report.problems] == ["version 4"]
