"""A Prefect server for the tests of flows, and a session that records what is asked of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterFlowRunId

from benchmarks.idle import step_record
from sprawl.board.records import EvaluationRecord, EventRecord, StepRecord
from sprawl.config import RunConfig, parse_config
from sprawl.run.receipts import CollectReceipt, FinishReceipt, PublishReceipt, StartReceipt, TrainReceipt


def task_run_names(flow_run_id: str, count: int) -> set[str]:
    """Of the task runs of a flow run, once there are `count`: they reach the database in batches, a second late."""
    mine = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[UUID(flow_run_id)]))
    deadline = time.monotonic() + 20.0
    with get_client(sync_client=True) as client:
        while len(runs := client.read_task_runs(task_run_filter=mine)) < count and time.monotonic() < deadline:
            time.sleep(0.2)
    return {run.name for run in runs}


@dataclass
class FakeLedger:
    committed: dict[int, StepRecord] = field(default_factory=dict)
    written: list[EventRecord] = field(default_factory=list)

    def write_event(self, event: EventRecord) -> None:
        self.written.append(event)

    def events(self) -> list[EventRecord]:
        return self.written

    def step(self, step: int) -> StepRecord | None:
        return self.committed.get(step)


@dataclass
class FakeReader:
    at: int | None = None

    def head(self) -> int | None:
        return self.at


@dataclass
class FakeSession:
    """`RunSession` without a model: `calls` is everything asked of it; `faults` run before a call does anything."""

    config: RunConfig
    head_step: int = 0
    run_id: str = "tiny-1"
    board: str = "/nowhere"
    calls: list[tuple[str, int]] = field(default_factory=list)
    faults: dict[tuple[str, int], list[Callable[[], Any]]] = field(default_factory=dict)
    ledger: FakeLedger = field(default_factory=FakeLedger)
    reader: FakeReader = field(default_factory=FakeReader)
    log_dir: str = "/nowhere/logs"
    store: None = None
    closed: int = 0

    def _call(self, name: str, step: int) -> None:
        self.calls.append((name, step))
        if faults := self.faults.get((name, step)):
            faults.pop(0)()

    def prepare(self) -> StartReceipt:
        self._call("prepare", 0)
        return StartReceipt(self.run_id, self.head_step, self.config.steps, self.head_step > 0, 0, 10, "dense")

    def collect(self, step: int) -> CollectReceipt:
        self._call("collect", step)
        return CollectReceipt(step, 4, 0.5, 10, [step - 1], 0.1, False)

    def train(self, step: int) -> TrainReceipt:
        self._call("train", step)
        return TrainReceipt(step, 0.0, 1.0, True, None, 0.1, False)

    def publish(self, step: int) -> PublishReceipt:
        self._call("publish", step)
        self.ledger.committed[step] = step_record(step)
        self.head_step = step
        return PublishReceipt(step, step, "delta", 5, 100, 0.01, "ab", 0.1, False)

    def evaluation_due(self, step: int) -> bool:
        return step == self.config.steps

    def evaluate(self, step: int) -> EvaluationRecord:
        self._call("evaluate", step)
        return EvaluationRecord(
            version=step, step=step, problems=4, correct=3, accuracy=0.75, seconds=0.1, finished_at=1.0
        )

    def finish(self) -> FinishReceipt:
        self._call("finish", self.head_step)
        return FinishReceipt(self.run_id, self.head_step, self.head_step + 1)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    monkeypatch.chdir(tmp_path)
    return FakeSession(parse_config({"name": "tiny", "steps": 3, "policy": {"base": "x"}}, "test"))


@dataclass
class Recorder:
    """A progress that keeps what it is shown."""

    steps: list[int] = field(default_factory=list)
    evaluations: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    finished: list[Any] = field(default_factory=list)

    def start(self, receipt: StartReceipt) -> None:
        self.notes.append(f"start {receipt.run_id}")

    def step(self, record: StepRecord) -> None:
        self.steps.append(record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        self.evaluations.append(record.version)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finish(self, receipt: FinishReceipt, report_path: Path | None) -> None:
        self.finished.append(SimpleNamespace(receipt=receipt, path=report_path))


@pytest.fixture
def progress() -> Recorder:
    return Recorder()


@pytest.fixture
def unused_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
