"""Drive a run without an orchestrator: the same phases in the same order, in this process."""

from __future__ import annotations

from pathlib import Path

from sprawl.report.page import write_report
from sprawl.run.options import RunOptions
from sprawl.run.session import RunSession
from sprawl.run.terminal import Progress


def resume_hint(options: RunOptions, run_id: str) -> str:
    """The command that continues a run."""
    return f"sprawl run {options.config_source} --resume {run_id}"


def run_plain(options: RunOptions, progress: Progress) -> int:
    """Run to the end. Returns the exit code; 130 after Ctrl-C, when everything that was started has been stopped."""
    session = RunSession.open(options)
    try:
        progress.start(session.prepare())
        for step in range(session.head_step + 1, session.config.steps + 1):
            session.collect(step)
            session.train(step)
            session.publish(step)
            record = session.ledger.step(step)
            if record is not None:
                progress.step(record)
            if session.evaluation_due(step):
                progress.evaluation(session.evaluate(step))
        finished = session.finish()
        report = write_report(session.store, session.run_id, Path("reports") / session.run_id)
        progress.finish(finished, report.index)
    except KeyboardInterrupt:
        progress.note(f"\nstopping; to continue: {resume_hint(options, session.run_id)}")
        return 130
    finally:
        session.close()
    return 1 if finished.violations else 0
