"""Drive a run without an orchestrator: the same phases in the same order, in this process."""

from __future__ import annotations

from pathlib import Path

from sprawl.errors import SprawlError, Verdict
from sprawl.report.page import write_report
from sprawl.run.options import RunOptions
from sprawl.run.receipts import FinishReceipt
from sprawl.run.session import RunSession
from sprawl.run.stopping import how_to_resume, terminate_as_interrupt
from sprawl.run.terminal import Progress

INTERRUPTED = 130


def run_plain(options: RunOptions, progress: Progress) -> int:
    """Run to the end. Returns the exit code: 0, 1 when the run finished with violations, 130 after Ctrl-C or SIGTERM.

    However it ends, everything that was started has been stopped. Raises SprawlError as the session does; after a
    Verdict of the drift controller the report is there, and the run is not worth resuming.
    """
    session = RunSession.open(options)
    try:
        with terminate_as_interrupt():
            finished = _steps(session, progress, page=options.page)
    except KeyboardInterrupt:
        session.close()
        progress.note(f"interrupted; what was committed is on the board\n{how_to_resume(options, session)}")
        return INTERRUPTED
    except Verdict:
        session.close()
        if options.page:
            report = write_report(session.store, session.run_id, Path("reports") / session.run_id)
            progress.note(f"stopped by its drift controller; report: {report.index}")
        raise
    except SprawlError:
        session.close()
        progress.note(how_to_resume(options, session))
        raise
    finally:
        session.close()
    return 1 if finished.violations else 0


def _steps(session: RunSession, progress: Progress, *, page: bool) -> FinishReceipt:
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
    report = write_report(session.store, session.run_id, Path("reports") / session.run_id).index if page else None
    progress.finish(finished, report)
    return finished
