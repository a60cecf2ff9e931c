"""Flow: post-train a model, one run from start (or resume) to report, or one segment of a long run."""

from __future__ import annotations

import os
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from prefect import flow, get_run_logger
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Crashed, State
from pydantic import Field

from flows.flow_runs import ThisFlowRun, write_chain
from flows.lineage import (
    ATTEMPT,
    Stretch,
    next_parameters,
    pause_before,
    stretch,
    tries_without_progress,
)
from flows.parameters import NewRunId, Positive
from flows.progress import Both, LoggedProgress, Progress
from flows.server import flow_run_url
from infra.limits import FUTILE_ATTEMPTS, MAX_ATTEMPTS, SEGMENT
from sprawl.board.records import EventRecord
from sprawl.errors import SprawlError, Verdict
from sprawl.run.drawn import drawn
from tasks.artifacts import ArtifactGate
from tasks.evaluate import evaluate_version
from tasks.publish_version import publish_version
from tasks.report import Reporter, report, write_page
from tasks.retrying import HOPELESS
from tasks.train_step import train_step

if TYPE_CHECKING:
    from sprawl.run.options import RunOptions
    from sprawl.run.receipts import FinishReceipt
    from sprawl.run.session import RunSession
    from tasks.events import Announcer


@dataclass
class Attached:
    """A run in a terminal's own process: what the terminal gives, and what it wants to know. A run of many segments is
    as many flow runs, one after another, over one session, and what the first has told the next need not tell.

    entered, left: whether the newest flow run came to train, and whether it trained its steps to the end. What it fails
    with otherwise is Prefect's, and no reason to end the run.
    """

    session: RunSession
    progress: Progress
    flow_run_id: str | None = None
    finished: FinishReceipt | None = None
    prepared: bool = False
    announcer: Announcer | None = None
    entered: bool = False
    left: bool = False


ATTACHED: ContextVar[Attached | None] = ContextVar("attached", default=None)


@flow(name="post-train", persist_result=False)
def post_train(
    config: str = "configs/tiny.yaml",
    resume: str | None = None,
    board: str | None = None,
    run_id: NewRunId | None = None,
    overrides: list[str] | None = None,
    fleet: str = "local",
    segment: Positive = SEGMENT,
    attempt: Annotated[int, Field(ge=0, le=MAX_ATTEMPTS)] = 0,
) -> dict[str, Any] | State[Any]:
    """Post-train a model with GRPO: islands sample, the trainer steps, every step is published as a version.

    The flow run takes the run id as its name and carries it as a tag. A flow run that crashes is started again by an
    automation, and a retried one goes on with the run it had started.

    Args:
        config: Run YAML, relative to the directory the worker serves. One YAML is one run; see configs/.
        resume: Run id to go on with ("latest" for the newest one on the board). The config is then the run's own.
        board: Directory or object-store URL the run lives on. Default: the config's `board`.
        run_id: Id of a new run. Default: made from the config's name and the time.
        overrides: Changes to the config, each "section.field=value", for example "steps=20".
        fleet: Who starts islands and anchor. local: this process; none: somebody else (sky/*.yaml); sky: SkyPilot jobs.
        segment: Steps of one flow run. A longer run is a chain of flow runs, each started by the one before.
        attempt: Leave it at 0. The automation that starts crashed flow runs again counts here.
    """
    attached = ATTACHED.get()
    if attached is not None:
        return _in_terminal(attached, segment)
    this = ThisFlowRun()
    options = _options(this, config, resume, board, run_id, overrides or [], attempt, fleet)
    name = options.resume or options.run_id
    assert name is not None, "made up where nobody chose it"
    shown = {
        "config": config,
        "overrides": overrides,
        "fleet": fleet,
        "segment": segment,
        "attempt": attempt,
        "board": options.board,
    }
    this.claim(name, {**shown, "run_id": options.run_id, "resume": options.resume})
    rival = this.rival(name)
    if rival is not None:
        return Cancelled(message=f"{name} is being trained by flow run {rival.name} ({flow_run_url(str(rival.id))})")
    session: RunSession | None = None
    try:
        session = open_session(options)
        _count_attempt(session, attempt)
        return _in_worker(this, session, segment, attempt, shown)
    except (*HOPELESS, GaveUp):
        raise
    except Exception as error:
        if session is None and attempt == 0:
            raise  # wrong from the start: whoever started it reads it now
        get_run_logger().exception("the run stopped at what a new start may cure")
        return Crashed(message=f"{type(error).__name__}: {error}")
    finally:
        if session is not None:
            session.close()


def _in_worker(
    this: ThisFlowRun, session: RunSession, segment: int, attempt: int, shown: dict[str, Any]
) -> dict[str, Any] | State[Any]:
    """A flow run that a worker started: it has a deployment, which the next segment is asked from."""
    progress = LoggedProgress(get_run_logger())
    reporter = Reporter(this.id, ArtifactGate(on_pause=progress.note), progress.note)
    progress.start(session.prepare())
    announcer = reporter.begin(session)
    work = stretch(session.head_step, session.config.steps, segment)
    this.rename(work.name(session.run_id))
    chained = attempt > 0 or session.config.steps > segment
    if chained:
        write_chain(session.run_id, reporter.gate, this.id)
    finished: FinishReceipt | None = None
    while finished is None:
        finished = train(session, work, progress, reporter, announcer)
        if finished is None:
            url = _hand_over(this, session, work, progress, shown)
            if url is not None:
                write_chain(session.run_id, reporter.gate, this.id)
                reporter.gate.drain(10.0)
                return {"run_id": session.run_id, "steps": work.last, "next": url}
            work = stretch(session.head_step, session.config.steps, segment)
    if chained:
        write_chain(session.run_id, reporter.gate, this.id)
        reporter.gate.drain(10.0)
    return finished.as_dict()


def _hand_over(
    this: ThisFlowRun, session: RunSession, work: Stretch, progress: Progress, shown: dict[str, Any]
) -> str | None:
    """Ask for the flow run of the next segment: its address, or None when there is nobody to ask. Then this flow run
    goes on itself."""
    try:
        url = this.successor(session.run_id, work.last, next_parameters(shown, session.run_id, session.board))
    except Exception as error:
        progress.note(f"no flow run for the next segment ({error}): going on in this one")
        return None
    progress.note(f"goes on after step {work.last} in {url}")
    return url


def _in_terminal(attached: Attached, segment: int) -> dict[str, Any] | State[Any]:
    """The next segment of the terminal's session, which is closed when the run ends, however it ends. One that Prefect
    does not take leaves it open: flows/terminal.py goes on with it."""
    session, this = attached.session, ThisFlowRun()
    progress = Both(attached.progress, LoggedProgress(get_run_logger()))
    try:
        this.claim(session.run_id)
        attached.entered = True
        attached.flow_run_id = this.id
        this.rename(session.run_id)
        progress.note(f"UI: {flow_run_url(this.id)}")
        if not attached.prepared:
            progress.start(session.prepare())
            attached.prepared = True
        work = stretch(session.head_step, session.config.steps, segment)
        this.rename(work.name(session.run_id))
        reporter = Reporter(this.id, ArtifactGate(on_pause=progress.note), progress.note)
        attached.announcer = reporter.begin(session, attached.announcer)
        finished = train(session, work, progress, reporter, attached.announcer)
        if finished is None:
            attached.left = True
            return {"run_id": session.run_id, "steps": work.last}
        attached.finished, attached.left = finished, True
        return finished.as_dict()
    except (KeyboardInterrupt, TerminationSignal):
        return Cancelled(message=f"Interrupted in the terminal; resume with --resume {session.run_id}")
    finally:
        if attached.entered and (attached.finished or not attached.left):
            session.close()


def _count_attempt(session: RunSession, attempt: int) -> None:
    """Write this start into the ledger; an automatic one waits, or gives up, when those before it led nowhere.

    Raises GaveUp.
    """
    head = session.reader.head() or 0
    starts = [event for event in session.ledger.events() if event.kind == ATTEMPT]
    before = [(int(event.data.get("number", 0)), event.step) for event in starts]
    tries = tries_without_progress(attempt, head, before)
    message = f"started automatically, attempt {attempt}" if attempt else "started"
    session.ledger.write_event(
        EventRecord(kind=ATTEMPT, at=time.time(), step=head, message=message, data={"number": attempt, "tries": tries})
    )
    if tries > FUTILE_ATTEMPTS:
        raise GaveUp(
            f"gave up on run {session.run_id}: {FUTILE_ATTEMPTS} automatic starts in a row made no step after {head}",
            f"read {session.log_dir} and the crashed flow runs, then resume it: prefect deployment run "
            f"post-train/local -p resume={session.run_id}",
        )
    if tries > 1:
        pause = pause_before(tries)
        get_run_logger().warning("attempt %d without a new step: waiting %.0f s before it", tries, pause)
        time.sleep(pause)


class GaveUp(SprawlError):
    """A run that crashed again and again at the same step."""


def train(
    session: RunSession, work: Stretch, progress: Progress, reporter: Reporter, announcer: Announcer
) -> FinishReceipt | None:
    """The steps of a flow run, two tasks each, and the end of the run if they reach it (None: they do not).

    What was committed before stays committed whatever happens here. Raises what the session raises; after a Verdict of
    the drift controller the report is there.
    """
    try:
        _steps(session, work, progress, reporter, announcer)
    except Verdict:
        _show_verdict(session, progress, reporter)
        raise
    if not work.final:
        # The flow run after this one tells only of what is new to it.
        reporter.gate.drain(5.0)
        report(session, work.last, reporter)
        reporter.gate.drain(10.0)
        return None
    finished = session.finish()
    reporter.gate.drain(5.0)  # the page and the artifacts draw figures: not at the same time
    progress.finish(finished, drawn(session, progress, write_page))
    report(session, work.last, reporter)
    reporter.gate.drain(10.0)
    return finished


def _steps(session: RunSession, work: Stretch, progress: Progress, reporter: Reporter, announcer: Announcer) -> None:
    for step in range(session.head_step + 1, work.last + 1):
        train_step(session, step)
        publish_version(session, step, announcer)
        record = session.ledger.step(step)
        if record is not None:
            progress.step(record)
        if session.evaluation_due(step):
            evaluate_version(session, step, progress.evaluation)
        if step < work.last and reporter.due():
            report(session, step, reporter)


def _show_verdict(session: RunSession, progress: Progress, reporter: Reporter) -> None:
    """A run that its drift controller stopped is over: its islands go, its page is drawn, the artifacts say so."""
    session.close()
    reporter.gate.drain(5.0)
    page = drawn(session, progress, write_page)
    if page is not None:
        progress.note(f"stopped by its drift controller; report: {page}")
    report(session, session.head_step, reporter)
    reporter.gate.drain(10.0)


def open_session(options: RunOptions) -> RunSession:
    """A session whose anchor is a flow run of its own, in a process of its own."""
    from sprawl.run.session import RunSession

    return RunSession.open(options, anchor_argv=(sys.executable, "-m", "flows.anchor"))


def _options(
    this: ThisFlowRun,
    config: str,
    resume: str | None,
    board: str | None,
    run_id: str | None,
    overrides: list[str],
    attempt: int,
    fleet: str,
) -> RunOptions:
    """Flow parameters as run options, with the run named. An automatic start and a retry go on with the run that the
    first attempt had created, if it had come that far.

    Raises SprawlError for whatever is wrong: nothing has been made by then.
    """
    from sprawl.board import keys
    from sprawl.board.ledger import resolve_run
    from sprawl.board.store import open_store
    from sprawl.config import load_config
    from sprawl.run.fleet import check_fleet
    from sprawl.run.options import RunOptions, absolute_board, new_run_id

    check_fleet(fleet)
    if resume is not None:
        place = absolute_board(board or os.environ.get("SPRAWL_BOARD", "runs"))
        return RunOptions(None, config, place, resume=resolve_run(open_store(place), resume), fleet=fleet)
    parsed = load_config(config, overrides)
    place = absolute_board(board or parsed.board)
    if run_id is not None and (attempt > 0 or this.retried) and open_store(place, create=True).exists(keys.run(run_id)):
        return RunOptions(None, config, place, resume=run_id, fleet=fleet)
    return RunOptions(parsed, config, place, run_id=run_id or new_run_id(parsed.name), fleet=fleet)
