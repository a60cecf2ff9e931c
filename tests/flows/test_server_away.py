"""The server goes away while a run trains, in the two ways servers do: the run is not held up and finishes."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from prefect.events.clients import PrefectEventsClient
from prefect.events.worker import EventsWorker
from prefect.runtime import flow_run
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from flows import terminal
from flows.post_train import ATTACHED, Attached, post_train
from sprawl.board.ledger import Ledger
from sprawl.board.store import MemoryStore
from sprawl.config import parse_config
from tasks import report
from tasks.artifacts import ArtifactGate
from tests.flows.conftest import FakeSession, Recorder
from tests.flows.flaky import Mode, Way, way_to
from tests.report.plausible import make_run_record, make_step

STEPS, CUT_AT = 40, 10
TIMEOUT_S = 8.0
"""Of a call to the server: a step that made one would take as long, in a run as it is 60 s and more."""


class Training(FakeSession):
    """Commits its steps to a real ledger, 20 ms each, notes when, and cuts or opens the way to the server at some."""

    way: Way
    cuts: dict[int, Mode]

    def begin(self, way: Way, cuts: dict[int, Mode]) -> None:
        self.way, self.cuts = way, cuts
        store = MemoryStore()
        self.ledger = Ledger(store, self.run_id)  # type: ignore[assignment]
        self.ledger.create_run(make_run_record(run_id=self.run_id, steps=self.config.steps))
        self.times: list[float] = []

    def publish(self, step: int):
        time.sleep(0.02)
        self.ledger.write_step(make_step(step))
        self.head_step = step
        self.times.append(time.monotonic())
        if step in self.cuts:
            self.way.cut(self.cuts[step])
        return SimpleNamespace(version=step, step=step, kind="delta")


@contextlib.contextmanager
def events_through(url: str) -> Iterator[None]:
    """Events go this way, too. Prefect keeps one sender a process, whatever the settings say later, and it would go on
    trying to send what the server missed for minutes: this one ends with the test."""
    EventsWorker.set_client_override(PrefectEventsClient, api_url=url, reconnection_attempts=0)
    try:
        yield
    finally:
        sender = EventsWorker.instance()
        EventsWorker.set_client_override(None)
        with contextlib.suppress(queue.Empty):
            while True:
                sender._queue.get_nowait()
        sender._stop()


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("mode", ["refuses", "hangs"])
def test_a_run_whose_server_goes_away_is_not_held_up_and_finishes(
    mode: Mode, progress: Recorder, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "SECONDS_BETWEEN", 0.0)  # a report each time the one before is done
    monkeypatch.setattr(report, "SHARE", 1e9)
    monkeypatch.setattr(ArtifactGate, "drain", lambda self, timeout_s: None)  # at the end, for a bounded time
    session = Training(parse_config({"name": "tiny", "steps": STEPS, "policy": {"base": "x"}}, "test"))
    impatient = {PREFECT_API_REQUEST_TIMEOUT: TIMEOUT_S, PREFECT_CLIENT_MAX_RETRIES: 1}
    with (
        way_to(PREFECT_API_URL.value()) as (way, url),
        temporary_settings({PREFECT_API_URL: url, **impatient}),
        events_through(url),
    ):
        session.begin(way, {CUT_AT: mode})
        attached = Attached(session, progress)  # type: ignore[arg-type]
        token = ATTACHED.set(attached)
        try:
            # Its last state cannot reach the server; flows/terminal.py says so and goes on.
            with contextlib.suppress(Exception):
                post_train()
        finally:
            ATTACHED.reset(token)
    assert attached.finished is not None
    assert attached.finished.steps == STEPS
    assert session.calls[-1] == ("finish", STEPS)
    gaps = [later - earlier for earlier, later in zip(session.times, session.times[1:], strict=False)]
    # What goes on beside the steps (tracebacks of lost events) may cost time, on a busy machine a second or two.
    assert max(gaps) < TIMEOUT_S / 2, f"a step took {max(gaps):.1f} s, before the cut {max(gaps[: CUT_AT - 1]):.1f} s"


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_segments_whose_server_is_away_are_trained_without_it_and_later_ones_with_it_again(
    progress: Recorder, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps in segments of two; the server does not answer while the first segment ends and in the second one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ArtifactGate, "drain", lambda self, timeout_s: None)
    monkeypatch.setattr(terminal, "flow_parameters", lambda *_: {"segment": 2})
    session = Training(parse_config({"name": "tiny", "steps": 6, "policy": {"base": "x"}}, "test"))
    impatient = {PREFECT_API_REQUEST_TIMEOUT: 2.0, PREFECT_CLIENT_MAX_RETRIES: 0}
    with (
        way_to(PREFECT_API_URL.value()) as (way, url),
        temporary_settings({PREFECT_API_URL: url, **impatient}),
        events_through(url),
    ):
        session.begin(way, {2: "hangs", 4: "passes"})
        attached = Attached(session, progress)  # type: ignore[arg-type]
        flow_runs: list[str | None] = []
        train = session.train
        monkeypatch.setattr(session, "train", lambda step: (flow_runs.append(flow_run.id), train(step))[1])
        terminal._run(None, attached)  # type: ignore[arg-type]
    assert attached.finished is not None
    assert [call for call in session.calls if call[0] == "train"] == [("train", step) for step in range(1, 7)]
    assert session.closed == 1
    first, second, third = (set(flow_runs[start : start + 2]) for start in (0, 2, 4))
    assert second == {None}
    assert len(first) == len(third) == 1
    assert first != third != {None}
    assert any("everything to step 2 is complete" in note for note in progress.notes)
    assert any("no flow run for the steps to 4" in note and "without Prefect" in note for note in progress.notes)
