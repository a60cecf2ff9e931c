"""Drive a run without an orchestrator: the same phases in the same order, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from sprawl.board.records import EvaluationRecord, StepRecord
from sprawl.errors import SprawlError, Verdict
from sprawl.report.page import write_report
from sprawl.run.drawn import drawn
from sprawl.run.options import RunOptions
from sprawl.run.receipts import FinishReceipt
from sprawl.run.session import RunSession
from sprawl.run.stopping import how_to_resume, terminate_as_interrupt
from sprawl.run.terminal import Progress

INTERRUPTED = 130


class Watcher(Protocol):
    """What is told as a run goes on."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvaluationRecord) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self, receipt: FinishReceipt, report_path: Path | None) -> None: ...


def run_plain(options: RunOptions, progress: Progress) -> int:
    """Run to the end. Returns the exit code: 0, 1 when the run finished with violations, 130 after Ctrl-C or SIGTERM.

    However it ends, everything that was started has been stopped. Raises SprawlError as the session does; after a
    Verdict of the drift controller the report is there, and the run is not worth resuming.
    """
    session = RunSession.open(options)
    try:
        with terminate_as_interrupt():
            progress.start(session.prepare())
            drive(session, progress, session.config.steps)
            finished = finish(session, progress, page=options.page)
    except KeyboardInterrupt:
        session.close()
        progress.note(f"interrupted; what was committed is on the board\n{how_to_resume(options, session)}")
        return INTERRUPTED
    except Verdict:
        show_verdict(session, progress, page=options.page)
        raise
    except SprawlError:
        session.close()
        progress.note(how_to_resume(options, session))
        raise
    finally:
        session.close()
    return 1 if finished.violations else 0


def drive(session: RunSession, progress: Watcher, last: int) -> None:
    """The steps from where the run is to `last`. Raises what the session raises."""
    for step in range(session.head_step + 1, last + 1):
        session.collect(step)
        session.train(step)
        session.publish(step)
        record = session.ledger.step(step)
        if record is not None:
            progress.step(record)
        if session.evaluation_due(step):
            progress.evaluation(session.evaluate(step))


def finish(session: RunSession, progress: Watcher, *, page: bool) -> FinishReceipt:
    """Check a run whose last step is done, and with `page` draw its report."""
    finished = session.finish()
    progress.finish(finished, drawn(session, progress, _write) if page else None)
    return finished


def show_verdict(session: RunSession, progress: Watcher, *, page: bool) -> None:
    """A run that its drift controller stopped is over: its islands go, and with `page` its report is drawn."""
    session.close()
    report = drawn(session, progress, _write) if page else None
    if report is not None:
        progress.note(f"stopped by its drift controller; report: {report}")


def _write(session: RunSession, directory: str) -> str:
    return str(write_report(session.store, session.run_id, Path(directory)).index)
