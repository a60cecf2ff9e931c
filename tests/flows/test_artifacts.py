"""Artifacts never hold up training: the gate returns at once, drops, gives up and tries again."""

from __future__ import annotations

import threading
import time

from tasks.artifacts import ArtifactGate, artifact_key
from tasks.report import version_rows
from tests.flows.conftest import step_record


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fail() -> None:
    raise ConnectionError("no server")


def test_a_write_that_blocks_does_not_block_the_caller() -> None:
    gate, release = ArtifactGate(), threading.Event()
    began = time.monotonic()
    assert gate.submit(release.wait)
    assert time.monotonic() - began < 1
    assert not gate.submit(lambda: None)  # dropped while the first is under way
    release.set()
    gate.drain(5)
    assert gate.submit(lambda: None)


def test_failures_open_the_breaker_and_success_after_the_cooldown_closes_it() -> None:
    clock = Clock()
    said: list[str] = []
    gate = ArtifactGate(max_failures=2, cooldown_s=60, on_pause=said.append, clock=clock)
    tried = []
    for _ in range(2):
        assert gate.submit(fail)
        gate.drain(5)
    assert gate.open
    assert said == ["Prefect takes no artifacts (ConnectionError: no server); they pause, training goes on"]
    assert not gate.submit(lambda: tried.append(1))
    clock.now = 61
    assert not gate.open
    assert gate.submit(fail)  # one try; it fails, so the breaker opens again at once
    gate.drain(5)
    assert gate.open
    clock.now = 200
    assert gate.submit(lambda: tried.append(2))
    gate.drain(5)
    assert gate.submit(fail)
    gate.drain(5)
    assert not gate.open  # the success had reset the count
    assert tried == [2]


def test_a_write_that_never_returns_counts_as_failed_and_is_abandoned() -> None:
    clock, release = Clock(), threading.Event()
    gate = ArtifactGate(timeout_s=20, max_failures=1, cooldown_s=60, clock=clock)
    assert gate.submit(release.wait)
    clock.now = 21
    assert not gate.submit(lambda: None)
    assert gate.open
    clock.now = 100
    done = threading.Event()
    assert gate.submit(done.set)  # a new thread: the old one still hangs
    assert done.wait(5)
    release.set()


def test_drain_gives_up_after_its_timeout() -> None:
    gate, release = ArtifactGate(), threading.Event()
    gate.submit(release.wait)
    began = time.monotonic()
    gate.drain(0.05)
    assert time.monotonic() - began < 2
    release.set()


def test_artifact_keys_are_what_prefect_allows() -> None:
    assert artifact_key("run", "tiny_v1.2-20260801-101500") == "run-tiny-v1-2-20260801-101500"


def test_version_rows_are_newest_first_and_bounded() -> None:
    rows = version_rows([step_record(step) for step in range(1, 6)], limit=2)
    assert [row["version"] for row in rows] == [5, 4]
    assert rows[0]["share of full"] == 0.05
