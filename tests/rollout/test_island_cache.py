"""Islands that keep their checkpoint on disk, as real processes: killed, damaged, crowded, out of room, long away."""

from __future__ import annotations

import re
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from sprawl.board import keys
from sprawl.board.local_copy import MARK, LocalCopy
from sprawl.board.manifest import DELTA, KEYFRAME
from sprawl.board.merged import merge
from sprawl.board.reader import VersionReader
from sprawl.board.records import IslandRecord
from sprawl.board.retention import gc
from sprawl.delta.files import WEIGHTS, load_state
from sprawl.delta.state import root_digest, tensor_digests
from tests.rollout.processes import DiskRun, command, environment, process, wait_for

pytestmark = pytest.mark.slow
QUESTION = {"text": "1+1=", "sampling_params": {"max_new_tokens": 8, "seeds": [7]}}


@pytest.fixture
def run(tmp_path: Path) -> DiskRun:
    run = DiskRun(tmp_path / "runs")
    run.publish()
    return run


class Cached:
    """One island after the other on the same cache."""

    def __init__(self, run: DiskRun, tmp_path: Path) -> None:
        self.run = run
        self.cache = tmp_path / "cache"
        self.log = tmp_path / "log"
        self.argv = command(run, "--island-id", "east", "--cache", str(self.cache))

    def start(self, *arguments: str) -> Any:
        return process([*self.argv, *arguments], self.log)

    def serves(self, version: int) -> IslandRecord:
        def found() -> Any:
            islands = [r for r in self.run.ledger.islands() if r.island_id == "east"]
            return [r for r in islands if r.state == "ready" and r.applied == version]

        return wait_for(found, self.log)[0]

    def fetched(self) -> int:
        """Bytes of blobs that the last island read before its first version was in service."""
        said = wait_for(lambda: re.search(r"in service after (\d+) bytes", self.log.read_text()), self.log)
        return int(said[1])

    def forget(self) -> None:
        """As if the heartbeat of the one that was killed had gone stale."""
        self.run.ledger.remove_island("east")

    def root(self) -> str:
        return root_digest(tensor_digests(load_state(self.cache / "checkpoint")))

    def published_root(self) -> str:
        return root_digest(tensor_digests(self.run.state))

    def drop_blobs(self, role: str) -> int:
        """Delete all blobs of a kind from the board; how many."""
        reader, dropped = VersionReader(self.run.store, self.run.run_id), 0
        for version in reader.versions():
            for entry in reader.require(version).parts(role):
                self.run.store.delete(keys.blob(self.run.run_id, version, entry.digest))
                dropped += 1
        return dropped


@pytest.fixture
def cached(run: DiskRun, tmp_path: Path) -> Cached:
    return Cached(run, tmp_path)


def answer(url: str) -> dict[str, Any]:
    with httpx.Client(base_url=url, timeout=60) as client:
        found = client.post("/generate", json=QUESTION).json()
    return {name: found[name] for name in ("samples", "weight_version_start", "weight_version_end")}


def test_a_killed_island_goes_on_from_its_disk(run: DiskRun, cached: Cached) -> None:
    """Without any keyframe on the board, and it answers as an island that was never killed."""
    run.nudge()
    with cached.start() as island:
        cached.serves(1)
        assert cached.fetched() > 0
        island.kill()
    cached.forget()
    assert sorted(path.name for path in (cached.cache / "checkpoint").iterdir()) == [
        "config.json",
        WEIGHTS,
        MARK,
        "tokenizer.json",
    ]
    run.nudge()
    undisturbed = cached.log.with_name("undisturbed")
    with process(command(run, "--island-id", "west"), undisturbed):
        west = wait_for(lambda: [r for r in run.ledger.islands() if r.applied == 2], undisturbed)[0]
        expected = answer(west.url)
    assert cached.drop_blobs(KEYFRAME) == 1
    manifest = VersionReader(run.store, run.run_id).require(2)
    with cached.start() as island:
        assert answer(cached.serves(2).url) == expected
        assert cached.fetched() == manifest.bytes_of(DELTA)
        island.kill()
    cached.forget()
    assert cached.drop_blobs(DELTA) == 2
    with cached.start():
        assert answer(cached.serves(2).url) == expected
        assert cached.fetched() == 0
    assert cached.root() == cached.published_root()


def test_a_bit_that_flipped_at_rest_is_found_and_fetched_again(run: DiskRun, cached: Cached) -> None:
    with cached.start():
        cached.serves(0)
    cached.forget()
    file = cached.cache / "checkpoint" / WEIGHTS
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes(data)
    with cached.start():
        cached.serves(0)
        assert cached.fetched() > len(data) // 2
        assert "model.safetensors is damaged" in cached.log.read_text()
    assert cached.root() == cached.published_root()


def test_a_bit_that_flips_under_a_running_island_is_found_by_the_next_version(run: DiskRun, cached: Cached) -> None:
    with cached.start():
        record = cached.serves(0)
        copy = LocalCopy.open(cached.cache / "checkpoint")  # maps the same file
        assert copy is not None
        copy.served.state["model.norm.weight"].view(-1)[5] *= -1
        run.nudge()
        wait_for(lambda: "wrong tensors" in (run.ledger.islands()[0].last_error or ""), cached.log)
        assert answer(record.url)["weight_version_end"] == 0, "served on meanwhile"
        cached.serves(1)
    assert cached.root() == cached.published_root()


def test_two_islands_do_not_share_a_cache(run: DiskRun, cached: Cached) -> None:
    with cached.start():
        cached.serves(0)
        second = [*command(run, "--cache", str(cached.cache), kind="sidecar")]
        done = subprocess.run(second, capture_output=True, text=True, env=environment(), timeout=60)
        pulled = subprocess.run(
            [*second[:3], "board", "pull", run.board, run.run_id, str(cached.cache / "checkpoint")],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=60,
        )
    assert (done.returncode, pulled.returncode) == (2, 2)
    line = "is in use by another process (give every island a directory of its own)"
    assert done.stderr.splitlines() == [f"sprawl: {cached.cache} {line}"]
    assert pulled.stderr.splitlines() == [f"sprawl: {cached.cache / 'checkpoint'} {line}"]


def test_a_full_disk_is_said_and_the_old_version_is_served(run: DiskRun, cached: Cached) -> None:
    with cached.start() as island:
        record = cached.serves(0)
        before, expected = cached.root(), answer(record.url)
        # No file of this process may grow beyond this any more: less than the journal of a new set of weights.
        resource.prlimit(island.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        run.publish()
        error = wait_for(lambda: run.ledger.islands()[0].last_error, cached.log)
        assert f"cannot write {cached.cache / 'checkpoint'}" in error
        assert "free some room there" in error
        assert answer(record.url) == expected
        assert cached.root() == before
        resource.prlimit(island.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert cached.serves(1).last_error is None
    assert cached.root() == cached.published_root()


def test_a_disk_that_is_really_full(run: DiskRun, cached: Cached) -> None:
    """A file system of its own with room for the checkpoint, but not for a journal of all of it; then for neither."""
    size = VersionReader(run.store, run.run_id).require(0).full_bytes
    for kilobytes, version, message in ((size // 1024 + 40, 0, "No space left"), (24, None, "has room for")):
        cached.cache.mkdir(exist_ok=True)
        mount = f'mount -t tmpfs -o size={kilobytes}k tmpfs {cached.cache} && exec "$@"'
        argv = ["unshare", "-rm", "sh", "-c", mount, "sh", *cached.argv]
        if shutil.which("unshare") is None or subprocess.run([*argv[:5], "sh", "true"], capture_output=True).returncode:
            pytest.skip("this machine does not let a user mount a file system of his own")
        with process(argv, cached.log):
            if version is not None:
                record = cached.serves(version)
                run.publish()
            error = wait_for(lambda: [r.last_error for r in run.ledger.islands() if r.last_error], cached.log)[0]
            assert message in error
            if version is not None:
                assert answer(record.url)["weight_version_end"] == version
        cached.forget()


def test_a_late_joiner_goes_straight_to_the_head(run: DiskRun, cached: Cached) -> None:
    for _ in range(9):
        run.nudge()
    with cached.start():
        assert cached.serves(9).versions_applied == 1
        assert cached.fetched() < 2 * VersionReader(run.store, run.run_id).require(8).bytes_of(KEYFRAME)


@pytest.mark.parametrize("way", ["merged", "pruned"])
def test_a_long_absence_is_one_step(run: DiskRun, cached: Cached, way: str) -> None:
    """The island sleeps while twenty versions come out: it takes the short cut, or, its chain gone, what is left."""
    with cached.start() as island:
        record = cached.serves(0)
        island.send_signal(signal.SIGSTOP)
        for _ in range(20):
            run.nudge()
        if way == "merged":
            merge(VersionReader(run.store, run.run_id), 0, 20)
            assert cached.drop_blobs(KEYFRAME) == 6
        else:
            run.ledger.remove_island("east")  # as long away as that it counts as lost
            gc(run.store, run.run_id, 1)
            assert VersionReader(run.store, run.run_id).versions() == [20]
        island.send_signal(signal.SIGCONT)
        assert cached.serves(20).versions_applied <= 8  # a few steps, then it sees how far behind it is
        assert answer(record.url)["weight_version_end"] == 20
    assert cached.root() == cached.published_root()


def test_a_cache_from_before_the_chain_was_pruned(run: DiskRun, cached: Cached) -> None:
    with cached.start():
        cached.serves(0)
    cached.forget()
    for _ in range(6):
        run.nudge()
    gc(run.store, run.run_id, 1)
    with cached.start():
        assert cached.serves(6).versions_applied == 1
    assert cached.root() == cached.published_root()
