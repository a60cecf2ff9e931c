"""A run in several flow runs tells Prefect's event system what one flow run would: everything, once."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flows import post_train as module
from flows.post_train import ATTACHED, Attached, post_train
from sprawl.board.ledger import Ledger
from sprawl.board.records import EventRecord
from sprawl.board.store import MemoryStore
from sprawl.config import parse_config
from sprawl.run.options import RunOptions
from tasks import report
from tests.flows.conftest import FakeSession, Recorder
from tests.report.plausible import make_run_record, make_step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]

STEPS, SEGMENT = 5, 2


class Training(FakeSession):
    """Commits its steps to a real ledger and loses an island at each, after its version was published."""

    def open(self) -> None:
        self.ledger = Ledger(MemoryStore(), self.run_id)  # type: ignore[assignment]
        self.ledger.create_run(make_run_record(run_id=self.run_id, steps=STEPS))  # type: ignore[attr-defined]

    def publish(self, step: int) -> Any:
        self._call("publish", step)
        self.ledger.write_step(make_step(step))  # type: ignore[attr-defined]
        self.head_step = step
        lost = EventRecord(kind="island_lost", at=time.time(), step=step, message=f"island-{step}")
        self.ledger.write_event(lost)
        return SimpleNamespace(version=step, step=step, kind="delta")


def in_terminal(session: Training, progress: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    attached = Attached(session, progress)  # type: ignore[arg-type]
    token = ATTACHED.set(attached)
    try:
        while attached.finished is None:
            post_train(segment=SEGMENT)
    finally:
        ATTACHED.reset(token)


def in_workers(session: Training, progress: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    this = SimpleNamespace(
        id="0d0e0f00-0000-4000-8000-000000000000",
        claim=lambda *_: None,
        rename=lambda *_: None,
        rival=lambda *_: None,
        successor=lambda *_: "http://ui/next",
    )
    options = RunOptions(session.config, "run.yaml", "/board", run_id=session.run_id)
    monkeypatch.setattr(module, "ThisFlowRun", lambda: this)
    monkeypatch.setattr(module, "_options", lambda *_: options)
    monkeypatch.setattr(module, "open_session", lambda _: session)
    monkeypatch.setattr(module, "write_chain", lambda *_: True)
    while session.head_step < STEPS:
        post_train(segment=SEGMENT)


@pytest.mark.parametrize(("drive", "again"), [(in_terminal, []), (in_workers, [2, 4])])
def test_nothing_is_lost_between_two_flow_runs(
    drive: Callable[..., None],
    again: list[int],
    progress: Recorder,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`again`: versions that a new process tells once more, under the same id, in case the one before had not."""
    sent: list[tuple[str, Any]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "SECONDS_BETWEEN", 1e9)  # only the reports that have to be
    monkeypatch.setattr(
        "prefect.events.emit_event",
        lambda event, payload, **_: sent.append((event, payload.get("version") or payload.get("message"))),
    )
    session = Training(parse_config({"name": "tiny", "steps": STEPS, "policy": {"base": "x"}}, "test"))
    session.run_id = f"tiny-{drive.__name__.replace('_', '-')}"
    session.open()
    drive(session, progress, monkeypatch)
    versions = [what for event, what in sent if event == "sprawl.version.published"]
    lost = [what for event, what in sent if event == "sprawl.island.lost"]
    assert sorted(versions) == sorted([*range(1, STEPS + 1), *again])
    assert sorted(lost) == [f"island-{step}" for step in range(1, STEPS + 1)]
