"""kill -9 of publishers and appliers on a real S3 server, and publishers that race for one version.

A victim dies before its n-th request, 0.5 or 2 ms into it, or when its reply has arrived, for every n. Every version
of a run is published that way, so each kill leaves what the next victim starts from.
"""

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sprawl.board import keys
from sprawl.board.commit import CommitOptions
from sprawl.board.local_copy import LocalCopy
from sprawl.board.publisher import Publisher
from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.board.verify import verify_board
from sprawl.errors import IntegrityError
from tests.board.seaweed import running
from tests.chaos.killing import each_point
from tests.chaos.scenes import RUN, play, root, state_of

pytestmark = pytest.mark.slow
PUBLISHED = 7  # versions; two keyframes among them
KILLS: dict[str, int] = {}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("seaweed"), "chaos") as url:
        yield url


def test_publishers_and_a_reader_beside_them(endpoint: str) -> None:
    url = "s3://chaos/publish"
    store = open_store(url, create=True, probe=True)
    violations: list[str] = []
    stop = threading.Event()

    def follow() -> None:
        """Never sees a version that cannot be rebuilt, never sees one go away."""
        reader = VersionReader(open_store(url), RUN)
        served = None
        try:
            while not stop.is_set():
                head = reader.head()
                if head is not None:
                    served = served or reader.materialise(head)
                    reader.advance(served, head)
                    assert served.root == root(served.version)
                time.sleep(0.05)
        except Exception as error:
            violations.append(repr(error))

    follower = threading.Thread(target=follow)
    follower.start()
    reader = VersionReader(store, RUN)
    try:
        for version in range(PUBLISHED):
            seen = set()
            for _ in each_point("publish", version, lambda _: (url, "")):
                KILLS["publish"] = KILLS.get("publish", 0) + 1
                head = reader.head()
                seen.add(head)
                assert head in {version - 1 if version else None, version}
                if head is not None:
                    assert reader.materialise(head).root == root(head)
            assert version in seen, "some kills came after the commit"
            assert reader.head() == version
    finally:
        stop.set()
        follower.join()
    assert violations == []
    report = verify_board(store, RUN)
    assert report.ok, report.problems
    assert report.versions == PUBLISHED


def test_appliers(endpoint: str, tmp_path: Path) -> None:
    url = "s3://chaos/apply"
    for version in range(4):
        play("publish", url, "", version)
    folder = tmp_path / "model"
    play("pull", url, str(folder), 1)
    shutil.copytree(folder, tmp_path / "start")

    def place(_: int) -> tuple[str, str]:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "start", folder)
        return url, str(folder)

    for _ in each_point("pull", 3, place):
        KILLS["pull"] = KILLS.get("pull", 0) + 1
        copy = LocalCopy.open(folder)
        assert copy is not None
        assert copy.served.root == root(copy.served.version)
    play("pull", url, str(folder), 3)


def test_twenty_racing_publishers_have_one_winner(endpoint: str) -> None:
    url = "s3://chaos/race"
    play("publish", url, "", 0)
    start = threading.Barrier(20)

    def attempt(i: int) -> str:
        writer = Publisher(open_store(url), RUN, CommitOptions(keyframe_every=4, dtype="bfloat16", writer=f"w{i}"))
        state = {**state_of(1), "mine": torch.tensor(float(i))}
        start.wait()
        try:
            writer.publish(1, 1, state)
        except IntegrityError as error:
            return "lost" if "never mean two states" in error.message else error.message
        return "won"

    with ThreadPoolExecutor(20) as pool:
        outcomes = list(pool.map(attempt, range(20)))
    assert outcomes.count("won") == 1
    assert outcomes.count("lost") == 19
    store = open_store(url)
    winner = VersionReader(store, RUN).materialise(1)
    assert winner.state["mine"].item() == outcomes.index("won")
    assert verify_board(store, RUN).ok
    assert len(store.list(keys.manifests(RUN))) == 2


def test_count() -> None:
    print(KILLS, sum(KILLS.values()))
    if len(KILLS) < 2:
        pytest.skip("the tests above were not all run")
    assert sum(KILLS.values()) >= 100
