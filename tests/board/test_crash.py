"""kill -9 at random moments of publishing loses nothing and needs no hand."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sprawl.board import keys
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.board.verify import verify_board
from sprawl.delta.state import root_digest, tensor_digests
from tests.board.publish_loop import state_of

KILLS = 15


@pytest.mark.slow
def test_kill_9_anywhere_in_publish(tmp_path: Path) -> None:
    board = str(tmp_path / "board")
    store = open_store(board, create=True)
    stop = threading.Event()
    violations: list[str] = []

    def follow() -> None:
        """A reader beside the writers: never sees a version that cannot be rebuilt."""
        reader = VersionReader(open_store(board), "run")
        served = None
        while not stop.is_set():
            head = reader.head()
            try:
                if head is not None and served is None:
                    served = reader.materialise(head)
                elif served is not None and head is not None:
                    reader.advance(served, head)
            except Exception as error:
                violations.append(repr(error))
                return
            time.sleep(0.002)

    follower = threading.Thread(target=follow)
    follower.start()
    rng = random.Random(7)
    try:
        for _ in range(KILLS):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.board.publish_loop", board, "run"],
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                time.sleep(rng.uniform(0.0, 0.12))
            finally:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
    finally:
        stop.set()
        follower.join()
    assert violations == []

    report = verify_board(store, "run")
    assert report.ok, report.problems
    reader = VersionReader(store, "run")
    head = reader.head()
    assert head is not None
    assert head > KILLS, "publishing must make progress between kills"
    assert reader.materialise(head).root == root_digest(tensor_digests(state_of(head)))

    store.delete(keys.latest("run"))
    publisher = Publisher(store, "run", keyframe_every=4, dtype="bfloat16", files={"config.json": b"{}"})
    assert publisher.publish(head, head, state_of(head)).already_committed
    publisher.publish(head + 1, head + 1, state_of(head + 1))
    assert verify_board(store, "run").ok
