"""The anchor flow: one task run a fire, none while idle, and no need for a server."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from uuid import UUID

import pytest
from click.testing import CliRunner
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from flows import anchor as module
from flows import server
from flows.anchor import anchor
from sprawl.board.records import FireRecord
from tests.flows.conftest import task_run_names


def fire_record(step: int) -> FireRecord:
    return FireRecord(
        step=step,
        newest_step=step - 20,
        checkpoints=[step - 20],
        forecast="stale",
        replayed_step=step,
        digest="ab",
        bytes=3,
        header_bytes=1,
        parameters=10,
        grad_norm=1.0,
        loss=0.0,
        optimizer_steps=0,
        seconds=0.1,
        finished_at=1.0,
    )


class FakeService:
    """Two fires, with idle polls in between."""

    def __init__(self, board: str, run_id: str) -> None:
        self.run_id = run_id
        self.config = SimpleNamespace(threads=SimpleNamespace(anchor=1))
        self.polls: list[int | None] = [None, None, 20, None, 40]
        self.fired: list[int] = []
        self.flow_run_id: str | None = None

    def finished(self) -> bool:
        return not self.polls

    def poll(self) -> int | None:
        self.flow_run_id = flow_run.id or self.flow_run_id
        return self.polls.pop(0)

    def fire(self, step: int) -> FireRecord:
        if step not in self.fired:
            self.fired.append(step)
        return fire_record(step)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeService:
    fake = FakeService("board", "run-1")
    monkeypatch.setattr("sprawl.anchor.service.AnchorService", lambda board, run_id: fake)
    monkeypatch.setattr("sprawl.anchor.service.IDLE_S", 0.01)
    monkeypatch.setattr("sprawl.board.store.open_store", lambda url: None)
    monkeypatch.setattr("sprawl.board.ledger.resolve_run", lambda store, run_id: run_id)
    return fake


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_each_fire_is_a_task_run_and_waiting_is_none(service: FakeService) -> None:
    assert anchor("run-1", "board") == {"run_id": "run-1", "fires": 2}
    assert service.fired == [20, 40]
    server.flush()
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(UUID(service.flow_run_id)).name == "anchor-run-1"
    assert task_run_names(service.flow_run_id, 2) == {"fire-anchor-20", "fire-anchor-40"}


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_sigterm_ends_it_as_cancelled_and_not_as_done(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "fire", lambda step: signal.raise_signal(signal.SIGTERM))
    result = CliRunner().invoke(module.main, ["--run-id", "run-1", "--board", "board"])
    assert result.exit_code == 143
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(service.flow_run_id)).state
    assert state is not None
    assert state.type.value == "CANCELLED"


def test_without_a_server_it_fires_all_the_same(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    monkeypatch.setattr(module, "reachable", lambda: False)
    monkeypatch.setattr(module, "bound_exit", left.append)
    result = CliRunner().invoke(module.main, ["--run-id", "run-1", "--board", "board"])
    assert result.exit_code == 0
    assert service.fired == [20, 40]
    assert left == [0]


def test_it_ends_when_its_parent_is_gone(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([100, 100, 100, 1])
    monkeypatch.setattr(module, "reachable", lambda: False)
    monkeypatch.setattr(module, "bound_exit", lambda code: None)
    monkeypatch.setattr(module.os, "getppid", lambda: next(parents, 1))
    CliRunner().invoke(module.main, ["--run-id", "run-1", "--board", "board", "--exit-with-parent"])
    assert service.fired == []
