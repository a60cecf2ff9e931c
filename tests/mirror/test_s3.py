"""A mirror of a board in object storage. Skipped without a real S3 server."""

from pathlib import Path

import pytest

from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.delta.state import root_digest, tensor_digests
from sprawl.mirror.store import MirroredStore
from tests.board.seaweed import running as s3
from tests.board.states import RUN, publish, state_of
from tests.mirror.support import Reads, metric, running, wait_for

pytestmark = pytest.mark.slow


def test_a_board_in_object_storage(tmp_path: Path) -> None:
    (tmp_path / "weed").mkdir()
    with s3(tmp_path / "weed", "boards"):
        board = open_store("s3://boards/runs", create=True)
        publish(board, 5)
        with running("s3://boards/runs", tmp_path / "cache", "--region", "east") as (_, record):
            reads = Reads(board)
            store = MirroredStore(reads, "east")  # type: ignore[arg-type]
            reader = VersionReader(store, RUN)
            served = reader.materialise(2)
            reader.advance(served, 4)
            assert served.root == root_digest(tensor_digests(state_of(4)))
            assert reads.of("/blobs/") == 0
            assert reader.manifest(5) is None
            wait_for(lambda: metric(record.url, "waiting_readers") == 1)
            asked = reads.reads.total()
            assert not store.exists(f"{RUN}/manifests/00000005.json")
            assert reads.reads.total() == asked
            store.close()
