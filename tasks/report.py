"""Task: show where the run stands as artifacts of the flow run. Never stalls or fails training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.artifacts import ArtifactGate, ArtifactWriter, artifact_key

if TYPE_CHECKING:
    from sprawl.board.records import EvaluationRecord, StepRecord
    from sprawl.run.session import RunSession


class Reporter:
    """Everything that writing the artifacts of one flow run needs: the gate and the writer."""

    def __init__(self, flow_run_id: Any, gate: ArtifactGate) -> None:
        self.gate = gate
        self.writer = ArtifactWriter(flow_run_id)

    def write(self, session: RunSession, step: int, *, tables: bool) -> None:
        """Read the ledger and write the artifacts. Blocks: call it through the gate."""
        from sprawl.report.page import live_markdown
        from sprawl.report.summary import summarise

        ledger = session.ledger
        steps, evaluations, fires = ledger.steps(), ledger.evaluations(), ledger.fires()
        reward = steps[-1].reward if steps else 0.0
        self.writer.progress(
            artifact_key("progress", session.run_id),
            100.0 * step / session.config.steps,
            f"step {step}/{session.config.steps} reward {reward:.2f}",
        )
        summary = summarise(ledger.run(), steps, evaluations, fires, ledger.events(), ledger.islands())
        text = live_markdown(summary, steps, evaluations, fires)
        self.writer.markdown(artifact_key("run", session.run_id), text, f"{session.run_id} after step {step}")
        if tables:
            self.writer.table(artifact_key("versions", session.run_id), version_rows(steps), "Published versions")
            self.writer.table(artifact_key("evaluations", session.run_id), evaluation_rows(evaluations), "Evaluations")


def version_rows(steps: list[StepRecord], limit: int = 500) -> list[dict[str, Any]]:
    """The newest `limit` versions, newest first."""
    return [
        {
            "version": record.version,
            "kind": record.kind,
            "reward": round(record.reward, 3),
            "sent bytes": record.delta.sent,
            "share of full": round(record.delta.sent / max(1, record.delta.dense), 4),
            "weights changed": round(record.changed_share, 5),
        }
        for record in reversed(steps[-limit:])
    ]


def evaluation_rows(evaluations: list[EvaluationRecord]) -> list[dict[str, Any]]:
    return [
        {"version": record.version, "problems": record.problems, "correct": record.correct, "accuracy": record.accuracy}
        for record in evaluations
    ]


@task(name="report", task_run_name="report-{step}", cache_policy=NO_CACHE, persist_result=False)
def report(session: RunSession, step: int, reporter: Reporter, tables: bool = False) -> dict[str, Any]:
    """Hand the artifacts to the helper thread; `written` is False when they were dropped."""
    return {"step": step, "written": reporter.gate.submit(lambda: reporter.write(session, step, tables=tables))}


@task(name="write-page", task_run_name="write-page", cache_policy=NO_CACHE, persist_result=False)
def write_page(session: RunSession, directory: str) -> str:
    """Write the run's HTML report into `directory`; returns the path of the page."""
    from sprawl.report.page import write_report

    return str(write_report(session.store, session.run_id, Path(directory)).index)
