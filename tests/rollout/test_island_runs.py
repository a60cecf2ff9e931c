"""A newer run begins on the board: islands that follow the latest run go over to it, the others stay."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from sprawl.board.commit import CommitOptions
from sprawl.board.ledger import Ledger
from sprawl.board.local_copy import LocalCopy
from sprawl.board.publisher import Publisher
from sprawl.board.records import RunRecord
from sprawl.board.store import MemoryStore
from sprawl.delta.state import root_digest, tensor_digests
from sprawl.rollout.fake import FakeEngine
from sprawl.rollout.gate import Refused
from sprawl.rollout.reconciler import Reconciler, Takeover
from sprawl.rollout.runs import RunWatcher
from sprawl.rollout.wire import SamplingParams, VersionPolicy
from tests.rollout.processes import CONFIG, DiskRun, command, process, wait_for
from tests.rollout.support import Stack, TinyRun, go, until

QUESTION = {"text": "1+1=", "sampling_params": {"max_new_tokens": 8, "seeds": [7]}}


def record(run_id: str, created_at: float) -> RunRecord:
    return RunRecord(run_id=run_id, created_at=created_at, config={}, base_digest="", parameters=0, sprawl_version="0")


def test_only_newer_runs_with_something_to_serve_count() -> None:
    store = MemoryStore()
    for run_id, at in (("old", 1.0), ("now", 2.0), ("next", 3.0)):
        Ledger(store, run_id).create_run(record(run_id, at))
    store.put("stray/file", b"")
    watcher = RunWatcher(store, record("now", 2.0))
    assert watcher.look() is None, "the next one has no version"
    for run_id in ("old", "next"):
        Publisher(store, run_id, CommitOptions(keyframe_every=4, dtype="bfloat16")).publish(
            0, 0, TinyRun().publish().states[0]
        )
    found = watcher.look()
    assert found is not None
    assert found.run_id == "next"
    watcher.postpone("next")
    assert watcher.look() is None
    store.put("broken/run.json", b"{")
    assert RunWatcher(store, record("now", 2.0)).look() is None


@pytest.mark.parametrize(("follow", "first"), [("demand", 0), ("eager", 2)])
def test_the_first_version_of_another_run_may_be_lower(follow: Any, first: int) -> None:
    """And what waits for a version of the run left behind is sent away, whatever the numbers are."""

    async def scenario() -> None:
        before, after = TinyRun().publish(6), TinyRun().publish(3)
        old, new = FakeEngine(), FakeEngine()
        async with Stack(before, old, follow="eager", max_wait_s=20) as stack:
            await until(lambda: stack.gate.version == 5)
            waiting = asyncio.ensure_future(
                stack.service.generate([[5]], SamplingParams(max_new_tokens=2), VersionPolicy(min_version=6))
            )
            await until(lambda: stack.gate.waiting)
            stack.reconciler.stop()
            await asyncio.wait_for(stack.task, 5)

            async def hand_over() -> None:
                assert stack.gate.active == 0
                stack.service.engine = new

            stack.reconciler = Reconciler(
                after.reader(),
                new,
                stack.gate,
                follow=follow,
                wake=stack.gate.wake,
                poll_s=0.01,
                takeover=Takeover("run-2", hand_over),
            )
            stack.task = asyncio.ensure_future(stack.reconciler.run())
            with pytest.raises(Refused) as caught:
                await waiting
            assert caught.value.answer.retryable
            await until(lambda: stack.gate.run_id == "run-2")
            assert stack.gate.version == first
            await until(lambda: new.calls[0] == ("load", first))
            answer = await stack.service.generate([[5]], SamplingParams(max_new_tokens=2), VersionPolicy())
            assert (answer.version_start, answer.version_end) == (first, first)

    go(scenario())


def info(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/server_info", timeout=60).json()


def ask(url: str, **policy: int) -> httpx.Response:
    return httpx.post(f"{url}/generate", json={**QUESTION, "weight_version": policy}, timeout=60)


@pytest.mark.slow
def test_an_island_goes_over_to_the_next_run(tmp_path: Path) -> None:
    run = DiskRun(tmp_path / "runs")
    for _ in range(4):
        run.publish()
    log, cache = tmp_path / "log", tmp_path / "cache"
    argv = command(run, "--island-id", "east", "--follow-latest-run", "--cache", str(cache))
    with process(argv, log) as island:
        first = wait_for(lambda: [r for r in run.ledger.islands() if r.applied == 3], log)[0]
        before = ask(first.url).json()
        # Long enough that the change of runs meets it; it belongs to the old run to its end.
        long = {"text": "1", "sampling_params": {"max_new_tokens": 1500, "temperature": 0}}
        answers: list[httpx.Response] = []
        asker = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{first.url}/generate", json=long, timeout=120))
        )
        following = DiskRun(tmp_path / "runs", "run-2")
        time.sleep(6)
        assert info(first.url)["run_id"] == run.run_id, "a run without a version is not worth it"
        asker.start()
        following.publish()
        east = wait_for(lambda: [r for r in following.ledger.islands() if r.applied == 0], log)[0]
        assert (east.url, east.pid) == (first.url, island.pid)
        asker.join()
        assert answers[0].status_code == 200
        assert answers[0].json()["weight_version_end"] == 3
        wait_for(lambda: run.ledger.islands() == [], log)
        assert info(first.url)["run_id"] == "run-2"
        after = ask(first.url).json()
        assert after["weight_version_end"] == 0
        assert after["samples"] != before["samples"]
        following.publish()
        wait_for(lambda: ask(first.url, min_version=1).status_code == 200, log)
        fresh_log = tmp_path / "fresh"
        with process(command(following, "--run-id", "run-2", "--island-id", "west"), fresh_log):
            west = wait_for(
                lambda: [r for r in following.ledger.islands() if r.island_id == "west" and r.applied == 1], fresh_log
            )[0]
            assert ask(west.url).json()["samples"] == ask(first.url).json()["samples"]
    copy = LocalCopy.open(cache / "east" / "checkpoint")
    assert copy is not None
    assert (copy.run_id, copy.served.version) == ("run-2", 1)
    assert copy.served.root == root_digest(tensor_digests(following.state))


@pytest.mark.slow
def test_a_run_that_cannot_be_served_here_is_left_alone(tmp_path: Path) -> None:
    run = DiskRun(tmp_path / "runs")
    run.publish()
    log = tmp_path / "log"
    with process(command(run, "--follow-latest-run"), log):
        east = wait_for(lambda: [r for r in run.ledger.islands() if r.applied == 0], log)[0]
        DiskRun(tmp_path / "runs", "run-2", {**CONFIG, "model_type": "unheard-of"}).publish()
        wait_for(lambda: "run run-2 cannot be served here" in log.read_text(), log)
        run.publish()
        wait_for(lambda: [r for r in run.ledger.islands() if r.applied == 1], log)
        assert ask(east.url).json()["weight_version_end"] == 1
