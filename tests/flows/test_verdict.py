"""A run that its drift controller stops: the flow run fails with the verdict, and the report is there."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from flows.post_train import ATTACHED, Attached, post_train
from sprawl.board.ledger import Ledger
from sprawl.board.store import MemoryStore
from sprawl.errors import Verdict
from tests.flows.conftest import FakeSession, Recorder
from tests.flows.test_artifacts import artifacts
from tests.report.plausible import make_run, put


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_verdict_leaves_a_report(session: FakeSession, progress: Recorder) -> None:
    store, data = MemoryStore(), make_run(steps=2, run_id=f"tiny-{uuid4().hex[:8]}")
    put(store, data)
    session.run_id, session.head_step = data.run.run_id, 2
    session.store, session.ledger = store, Ledger(store, session.run_id)  # type: ignore[assignment]

    def stop() -> None:
        raise Verdict("the mismatch grew for 40 steps", "lower optimizer.lr")

    session.faults["train", 3] = [stop]
    attached = Attached(session, progress)  # type: ignore[arg-type]
    token = ATTACHED.set(attached)
    try:
        with pytest.raises(Verdict, match="the mismatch grew"):
            post_train()
    finally:
        ATTACHED.reset(token)
    page = Path("reports") / session.run_id / "index.html"
    assert page.is_file()
    assert any(note == f"stopped by its drift controller; report: {page}" for note in progress.notes)
    assert "step **2** of" in artifacts(session.run_id)["run"][0].data
    assert session.closed >= 1
    assert attached.finished is None
