"""Flow: post-train a model, one run from start (or resume) to report."""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import flow, get_run_logger
from prefect.context import FlowRunContext
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, State

from flows.progress import Both, LoggedProgress, Progress
from flows.server import flow_run_url
from sprawl.board.records import EvaluationRecord
from tasks.artifacts import ArtifactGate
from tasks.collect_rollouts import collect_rollouts
from tasks.evaluate import evaluate_version
from tasks.publish_version import publish_version
from tasks.report import Reporter, report, write_page
from tasks.train_step import train_step

if TYPE_CHECKING:
    from sprawl.run.options import RunOptions
    from sprawl.run.receipts import FinishReceipt
    from sprawl.run.session import RunSession

ARTIFACTS_EVERY = 10  # steps; an artifact call costs up to 90 ms of server CPU


@dataclass
class Attached:
    """A flow run that goes on in a terminal's own process: what the terminal gives, and what it wants to know."""

    session: RunSession
    progress: Progress
    flow_run_id: str | None = None
    finished: FinishReceipt | None = None


ATTACHED: ContextVar[Attached | None] = ContextVar("attached", default=None)


@flow(name="post-train", persist_result=False)
def post_train(
    config: str = "configs/tiny.yaml",
    resume: str | None = None,
    board: str | None = None,
    run_id: str | None = None,
    overrides: list[str] | None = None,
    fleet: str = "local",
) -> dict[str, Any] | State[Any]:
    """Post-train a model with GRPO: islands sample, the trainer steps, every step is published as a version.

    The flow run takes the run id as its name. A retry of a flow run resumes the run it had started.

    Args:
        config: Run YAML, relative to the directory the worker serves. One YAML is one run; see configs/.
        resume: Run id to go on with ("latest" for the newest one on the board). The config is then the run's own.
        board: Directory or object-store URL the run lives on. Default: the config's `board`.
        run_id: Id of a new run. Default: made from the config's name and the time.
        overrides: Changes to the config, each "section.field=value", for example "steps=20".
        fleet: Who starts islands and anchor. local: this process; none: somebody else (sky/*.yaml).
    """
    attached = ATTACHED.get()
    if attached is not None:
        session = attached.session
        progress: Progress = Both(attached.progress, LoggedProgress(get_run_logger()))
    else:
        session = open_session(_options(config, resume, board, run_id, overrides or [], fleet))
        progress = LoggedProgress(get_run_logger())
    try:
        flow_run_id = _name_flow_run(session.run_id)
        if attached is not None:
            attached.flow_run_id = flow_run_id
            progress.note(f"UI: {flow_run_url(flow_run_id)}")
        finished = train(session, progress, Reporter(flow_run_id, ArtifactGate(on_pause=progress.note)))
        if attached is not None:
            attached.finished = finished
        return finished.as_dict()
    except (KeyboardInterrupt, TerminationSignal):
        if attached is None:
            raise  # the worker that sent the signal reports the state
        return Cancelled(message=f"Interrupted in the terminal; resume with --resume {session.run_id}")
    finally:
        session.close()


def train(session: RunSession, progress: Progress, reporter: Reporter) -> FinishReceipt:
    """The steps of a run, each phase a task. What was committed before stays committed whatever happens here."""
    started = session.prepare()
    progress.start(started)
    last = session.config.steps
    for step in range(session.head_step + 1, last + 1):
        collect_rollouts(session, step)
        train_step(session, step)
        publish_version(session, step)
        record = session.ledger.step(step)
        if record is not None:
            progress.step(record)
        evaluated = session.evaluation_due(step)
        if evaluated:
            progress.evaluation(EvaluationRecord(**evaluate_version(session, step)))
        if step < last and (evaluated or step % ARTIFACTS_EVERY == 0):
            report(session, step, reporter, tables=evaluated)
    finished = session.finish()
    reporter.gate.drain(5.0)  # the page and the artifacts draw figures: not at the same time
    progress.finish(finished, _page(session, progress))
    report(session, last, reporter, tables=True)
    reporter.gate.drain(10.0)
    return finished


def _page(session: RunSession, progress: Progress) -> Path | None:
    """The HTML report. A run that finished has finished, whether or not its page could be drawn."""
    try:
        return Path(write_page(session, str(Path("reports") / session.run_id)))
    except Exception as error:
        progress.note(f"no report page ({error}); try: sprawl report {session.run_id} --board {session.board}")
        return None


def open_session(options: RunOptions) -> RunSession:
    """A session whose anchor is a flow run of its own, in a process of its own."""
    from sprawl.run.session import RunSession

    return RunSession.open(options, anchor_argv=(sys.executable, "-m", "flows.anchor"))


def _options(
    config: str, resume: str | None, board: str | None, run_id: str | None, overrides: list[str], fleet: str
) -> RunOptions:
    """Flow parameters as run options. A retried flow run goes on with the run its first attempt created."""
    from sprawl.board import keys
    from sprawl.board.store import open_store
    from sprawl.config import load_config
    from sprawl.run.options import RunOptions, absolute_board

    if resume is not None:
        return RunOptions(
            None, config, absolute_board(board or os.environ.get("SPRAWL_BOARD", "runs")), resume=resume, fleet=fleet
        )
    parsed = load_config(config, overrides)
    place = absolute_board(board or parsed.board)
    name = flow_run.name
    if (flow_run.run_count or 1) > 1 and open_store(place, create=True).exists(keys.run(name)):
        return RunOptions(None, config, place, resume=name, fleet=fleet)
    return RunOptions(parsed, config, place, run_id=run_id, fleet=fleet)


def _name_flow_run(run_id: str) -> str:
    """Give the flow run its run's name; returns its id."""
    context = FlowRunContext.get()
    assert context is not None, "called in a flow run only"
    assert context.flow_run is not None, "called in a flow run only"
    context.client.set_flow_run_name(context.flow_run.id, run_id)
    return str(context.flow_run.id)
