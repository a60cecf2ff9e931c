"""Artifacts never hold up training: the gate returns at once, drops, gives up and tries again."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from benchmarks.idle import step_record
from sprawl.board.ledger import Ledger
from sprawl.board.store import MemoryStore
from tasks.artifacts import ArtifactGate, ArtifactWriter, artifact_key
from tasks.report import Reporter, evaluation_rows, island_rows, version_rows
from tests.report.plausible import T0, make_evaluation, make_island, make_run, put


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


def test_island_rows_say_who_is_lost() -> None:
    islands = [
        make_island("a", heartbeat_at=T0),
        make_island("b", heartbeat_at=T0 - 60),
        make_island("c", heartbeat_at=T0 - 60, state="failed", last_error="digest"),
    ]
    rows = island_rows(islands, T0 + 1)
    assert [row["state"] for row in rows] == ["ready", "lost", "failed"]
    assert [row["heartbeat, s ago"] for row in rows] == [1.0, 61.0, 61.0]
    assert rows[2]["last error"] == "digest"


def test_evaluation_rows_are_newest_first() -> None:
    rows = evaluation_rows([make_evaluation(0, 0.1), make_evaluation(20, 0.5)])
    assert [(row["version"], row["accuracy"]) for row in rows] == [(20, 0.5), (0, 0.1)]


# -- the reporter, against a real server and a real ledger


def finished_session() -> SimpleNamespace:
    """What a reporter asks of a session: a run of 100 steps on a ledger."""
    store, data = MemoryStore(), make_run(steps=100, run_id=f"tiny-{uuid4().hex[:8]}")  # its artifacts are its own
    put(store, data)
    ledger = Ledger(store, data.run.run_id)
    config = SimpleNamespace(steps=100)
    return SimpleNamespace(run_id=data.run.run_id, board="memory://", ledger=ledger, head_step=0, config=config)


def artifacts(run_id: str) -> dict[str, list]:
    with get_client(sync_client=True) as client:
        wanted = ArtifactFilter(key=ArtifactFilterKey(like_=run_id))
        found = client.read_artifacts(artifact_filter=wanted)
    kinds: dict[str, list] = {}
    for artifact in found:
        kinds.setdefault(artifact.key.removesuffix(f"-{run_id}"), []).append(artifact)
    return kinds


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_report_is_five_artifacts_that_are_updated_in_place() -> None:
    session, notes = finished_session(), []
    reporter = Reporter(None, ArtifactGate(), notes.append)
    reporter.begin(session)
    reporter.write(session, 50)
    reporter.write(session, 60)
    kept = artifacts(session.run_id)
    assert {kind: len(found) for kind, found in kept.items()} == dict.fromkeys(
        ("progress", "run", "versions", "islands", "evaluations"), 1
    )
    assert "step **60** of 100" in kept["run"][0].data
    assert kept["progress"][0].description.startswith("step 60/100 reward 0.")
    assert notes == []

    with get_client(sync_client=True) as client:
        client.delete_artifact(UUID(str(kept["run"][0].id)))
    reporter.write(session, 70)
    assert "step **70** of 100" in artifacts(session.run_id)["run"][0].data


def test_reports_take_a_fiftieth_of_the_time_at_most() -> None:
    clock = Clock()
    reporter = Reporter(None, ArtifactGate(), print, clock)
    assert reporter.due()
    assert not reporter.due()
    clock.now = 5.1
    assert reporter.due()
    reporter._took = 0.4  # as a slow server or a large ledger makes it
    clock.now = 10.3
    assert reporter.due()
    clock.now = 30.2
    assert not reporter.due()
    clock.now = 30.4
    assert reporter.due()


def test_a_server_that_is_gone_costs_the_caller_nothing(unused_port: int) -> None:
    gate = ArtifactGate(max_failures=2, on_pause=(said := []).append)
    writer = ArtifactWriter(None, timeout_s=1.0)
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{unused_port}/api", PREFECT_CLIENT_MAX_RETRIES: 0}):
        with pytest.raises(httpx.ConnectError):
            writer.markdown("key", "text", "")
        for _ in range(2):
            began = time.monotonic()
            assert gate.submit(lambda: writer.markdown("key", "text", ""))
            assert time.monotonic() - began < 0.5
            gate.drain(20)
    assert gate.open
    assert len(said) == 1
