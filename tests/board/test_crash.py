"""kill -9 at random moments of publishing loses nothing and needs no hand."""

import random
import threading
import time
from pathlib import Path

import pytest

from sprawl.board import keys
from sprawl.board.commit import CommitOptions
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.board.verify import verify_board
from sprawl.delta.state import root_digest, tensor_digests
from tests.board.publish_loop import publish_forever, state_of
from tests.forking import context

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
    processes = context()
    try:
        for _ in range(KILLS):
            ours, theirs = processes.Pipe(duplex=False)
            victim = processes.Process(target=publish_forever, args=(board, "run", theirs), daemon=True)
            victim.start()
            try:
                assert ours.poll(60)
                time.sleep(rng.uniform(0.0, 0.25))
                assert victim.is_alive(), "a publisher failed by itself"
            finally:
                victim.kill()
                victim.join()
                ours.close()
                theirs.close()
    finally:
        stop.set()
        follower.join()
    assert violations == []

    report = verify_board(store, "run")
    assert report.ok, report.problems
    reader = VersionReader(store, "run")
    head = reader.head()
    assert head is not None
    assert head > 3, "publishing must make progress between kills"
    assert reader.materialise(head).root == root_digest(tensor_digests(state_of(head)))

    store.delete(keys.latest("run"))
    publisher = Publisher(store, "run", CommitOptions(keyframe_every=4, dtype="bfloat16", files={"config.json": b"{}"}))
    assert publisher.publish(head, head, state_of(head)).already_committed
    publisher.publish(head + 1, head + 1, state_of(head + 1))
    assert verify_board(store, "run").ok
