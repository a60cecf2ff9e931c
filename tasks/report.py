"""Task: show where the run stands as artifacts, and tell what is new. Never stalls or fails training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from sprawl.event_names import RUN_UNHEALTHY
from tasks.artifacts import ArtifactGate, ArtifactWriter, artifact_key
from tasks.events import Announcer, occurrences

if TYPE_CHECKING:
    from sprawl.board.records import EvaluationRecord, IslandRecord, StepRecord
    from sprawl.report.data import RunData
    from sprawl.report.health import Finding
    from sprawl.run.session import RunSession

SECONDS_BETWEEN = 5.0
SHARE = 0.02
"""Of the run's time that reports may take, at most."""
MAX_ROWS = 500


class Reporter:
    """Everything that writing the artifacts of one flow run needs. `due` and the gate are the flow's thread's; `write`
    runs in the gate's, one at a time.

    note: shown a line, once, for each finding about the run.
    """

    def __init__(
        self,
        flow_run_id: Any,
        gate: ArtifactGate,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gate = gate
        self._note = note
        self._clock = clock
        self._writer = ArtifactWriter(flow_run_id)
        self._next = 0.0
        self._took = 0.0
        self._announcer: Announcer | None = None
        self._follow: Callable[[int], RunData] | None = None
        self._one = threading.Lock()  # a write that the gate gave up may still be going on

    def begin(self, session: RunSession, told: Announcer | None = None) -> Announcer:
        """The run has started, or goes on, after its newest committed version: what is told is what is new from now
        on. `told`: who has told of it before in this process, and goes on."""
        self._announcer = told or Announcer(session.run_id, session.board, head=session.head_step, began=time.time())
        return self._announcer

    def due(self) -> bool:
        """Whether it is time for another report: every few seconds, and less often where writing takes long."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + max(SECONDS_BETWEEN, self._took / SHARE)
        return True

    def write(self, session: RunSession, step: int) -> None:
        """Read what is new on the ledger, tell of it, write the artifacts. Blocks: call it through the gate."""
        from sprawl.report.health import findings
        from sprawl.report.live import live_markdown

        with self._one:
            began = self._clock()
            data = self._data(session, step)
            found = findings(data, time.time())
            self._tell(data, found)
            self._artifacts(data, live_markdown(data, found, session.ledger.promotions()), session.config.steps)
            self._took = self._clock() - began

    def _data(self, session: RunSession, step: int) -> RunData:
        from sprawl.report.follow import RunFollower

        if self._follow is None:
            self._follow = RunFollower(session.ledger).refresh
        return self._follow(step)

    def _tell(self, data: RunData, found: list[Finding]) -> None:
        assert self._announcer is not None, "begin comes first"
        for occurrence in self._announcer.catch_up(occurrences(data, found, time.time())):
            if occurrence.event == RUN_UNHEALTHY:
                self._note(f"needs attention: {occurrence.payload['message']}")

    def _artifacts(self, data: RunData, page: str, planned: int) -> None:
        run_id, step = data.run.run_id, data.last_step
        reward = data.steps[-1].reward if data.steps else 0.0
        write = self._writer
        write.progress(
            artifact_key("progress", run_id), 100.0 * step / planned, f"step {step}/{planned} reward {reward:.2f}"
        )
        write.markdown(artifact_key("run", run_id), page, f"{run_id} after step {step}")
        write.table(artifact_key("versions", run_id), version_rows(data.steps), "Published versions")
        write.table(artifact_key("islands", run_id), island_rows(data.islands, time.time()), "Islands")
        write.table(artifact_key("evaluations", run_id), evaluation_rows(data.evaluations), "Evaluations")


def version_rows(steps: Sequence[StepRecord], limit: int = MAX_ROWS) -> list[dict[str, Any]]:
    """The newest `limit` versions, newest first."""
    return [
        {
            "version": record.version,
            "kind": record.kind,
            "reward": round(record.reward, 3),
            "sent bytes": record.delta.sent,
            "share of full": round(record.delta.sent / max(1, record.delta.dense), 4),
            "weights changed": round(record.changed_share, 5),
            "seconds": round(record.seconds.get("total", 0.0), 2),
        }
        for record in reversed(steps[-limit:])
    ]


def island_rows(islands: Sequence[IslandRecord], now: float) -> list[dict[str, Any]]:
    """Every registered island; `state` is what it said last, or lost. `now` in Unix seconds."""
    from sprawl.board.ledger import is_live

    return [
        {
            "island": record.island_id,
            "state": record.state if record.state == "failed" or is_live(record, now) else "lost",
            "version": record.applied,
            "applied": record.versions_applied,
            "verified": record.versions_verified,
            "heartbeat, s ago": round(max(0.0, now - record.heartbeat_at), 1),
            "up, min": round((record.heartbeat_at - record.started_at) / 60, 1),
            "last error": record.last_error or "",
        }
        for record in islands
    ]


def evaluation_rows(evaluations: Sequence[EvaluationRecord], limit: int = MAX_ROWS) -> list[dict[str, Any]]:
    """The newest `limit` evaluations, newest first."""
    return [
        {
            "version": record.version,
            "problems": record.problems,
            "correct": record.correct,
            "accuracy": round(record.accuracy, 4),
            "seconds": round(record.seconds, 1),
        }
        for record in reversed(evaluations[-limit:])
    ]


@task(name="report", task_run_name="report-{step}", cache_policy=NO_CACHE, persist_result=False)
def report(session: RunSession, step: int, reporter: Reporter) -> None:
    """Hand the artifacts to the helper thread, which drops them when it is behind."""
    reporter.gate.submit(lambda: reporter.write(session, step))


@task(name="write-page", task_run_name="write-page", cache_policy=NO_CACHE, persist_result=False)
def write_page(session: RunSession, directory: str) -> str:
    """Write the run's HTML report into `directory`; returns the path of the page."""
    from sprawl.report.page import write_report

    return str(write_report(session.store, session.run_id, Path(directory)).index)
