"""The post-train flow in a terminal's own process: `sprawl run CONFIG --runner prefect`, with `--up` the stack too.

The flow runs here and not in the worker, so that Ctrl-C, exit codes and progress lines are what a terminal expects;
the UI shows the same flow run, tasks and artifacts as it would for the deployment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prefect.exceptions import TerminationSignal

from flows import server
from flows.lineage import stretch
from flows.post_train import ATTACHED, Attached, open_session, post_train
from flows.progress import Progress
from infra.limits import SEGMENT
from infra.stack import Stack, healthy
from sprawl.errors import Diverged, SprawlError, Verdict

if TYPE_CHECKING:
    from sprawl.config import RunConfig
    from sprawl.run.options import RunOptions

INTERRUPTED = 130


def run_in_terminal(options: RunOptions, *, up: bool) -> int:
    """Run or resume a run as a Prefect flow run in this process. Returns the exit code: 0, 1 when the run finished
    with violations, 130 when it was interrupted.

    With `up` the local stack is started where it is not up; otherwise its server, or the one of the Prefect settings,
    has to answer. Raises SprawlError when none does. A stack this call started is stopped again when the run is
    interrupted or fails, and stays up for a look at the UI when it finishes.
    """
    from sprawl.run.stopping import how_to_resume, terminate_as_interrupt
    from sprawl.run.terminal import Progress as TerminalProgress

    progress: Progress = TerminalProgress()
    stack = Stack()
    started = False
    session = open_session(options)  # first: a wrong config or board is found before anything starts
    attached = Attached(session, progress)
    try:
        with terminate_as_interrupt():
            started = _connect(stack, up, progress)
            server.quiet_console()
            _run(options, attached)
        server.flush()
        if attached.flow_run_id is not None and server.reachable():
            progress.note(f"UI: {server.flow_run_url(attached.flow_run_id)}")
        if up:
            progress.note("the stack stays up; to stop it: sprawl down")
        return _leave(1 if attached.finished is None or attached.finished.violations else 0)
    except (KeyboardInterrupt, TerminationSignal):
        _clean_up(attached, stack if started else None)
        progress.note(f"interrupted; what was committed is on the board\n{how_to_resume(options, session)}")
        return _leave(INTERRUPTED)
    except Exception as error:
        _clean_up(attached, stack if started else None)
        if not isinstance(error, Diverged):
            progress.note(how_to_resume(options, session))
        _leave(error.exit_code if isinstance(error, SprawlError) else 2)
        raise


def _connect(stack: Stack, up: bool, progress: Progress) -> bool:
    """Point this process at a server; whether this call started one. Raises SprawlError when there is none."""
    status = stack.status()
    if up:
        if status.server == "down":
            progress.note("starting the local stack (Prefect server, work pool, deployments, worker)")
        info = stack.up()
        for note in info.notes:
            progress.note(note)
        server.use(stack.environment(info.api_url))
        return info.started
    if status.server == "up" and status.api_url and healthy(status.api_url):
        server.use(stack.environment(status.api_url))
    elif not server.reachable():
        raise SprawlError("no Prefect server answers", "start one with --up or `sprawl up`, or use --runner plain")
    return False


def _run(options: RunOptions, attached: Attached) -> None:
    """The flow run itself, or one a segment; a segment that Prefect does not take is trained without it. Raises
    KeyboardInterrupt when it was interrupted, and whatever the run raised."""
    token = ATTACHED.set(attached)
    try:
        parameters = flow_parameters(options, attached.session.run_id)
        while attached.finished is None:
            _segment(attached, parameters)
    finally:
        ATTACHED.reset(token)


def _segment(attached: Attached, parameters: dict[str, Any]) -> None:
    attached.entered = attached.left = False
    try:
        if attached.prepared and not server.reachable():
            raise SprawlError("no Prefect server answers")  # at once, and not after the client's many tries
        state = post_train(**parameters, return_state=True)
        if state.is_cancelled():
            raise KeyboardInterrupt
        if not state.is_completed():
            state.result()  # raises what the run raised
            raise SprawlError(f"the flow run ended in state {state.name}: {state.message}")
    except Exception as error:
        if attached.left:
            what = "the run" if attached.finished else f"everything to step {attached.session.head_step}"
            attached.progress.note(
                f"{what} is complete; only the flow run's last state did not reach Prefect ({error})"
            )
        elif attached.prepared and not attached.entered:
            _without_prefect(attached, parameters.get("segment", SEGMENT), str(error))
        else:
            raise


def _without_prefect(attached: Attached, segment: int, reason: str) -> None:
    """One segment in this process alone. The next one asks Prefect again."""
    from sprawl.run.loop import drive, finish, show_verdict

    session, progress = attached.session, attached.progress
    work = stretch(session.head_step, session.config.steps, segment)
    progress.note(f"no flow run for the steps to {work.last} ({reason}): going on without Prefect")
    try:
        drive(session, progress, work.last)
    except Verdict:
        show_verdict(session, progress, page=True)
        raise
    if work.final:
        attached.finished = finish(session, progress, page=True)
        session.close()


def flow_parameters(options: RunOptions, run_id: str) -> dict[str, Any]:
    """Parameters under which the UI shows the run, and under which its deployment would run the same."""
    if options.config is None:
        return {"config": options.config_source, "resume": run_id, "board": options.board}
    return {
        "config": options.config_source,
        "board": options.board,
        "run_id": run_id,
        "overrides": config_overrides(options.config, options.config_source),
    }


def config_overrides(config: RunConfig, source: str) -> list[str]:
    """What `config` changes of the YAML at `source`, each "section.field=value"."""
    from sprawl.config import load_config

    def changes(base: Mapping[str, Any], changed: Mapping[str, Any], path: str) -> Iterator[str]:
        for name, value in changed.items():
            before = base.get(name)
            if isinstance(value, dict) and isinstance(before, dict) and name != "params":
                yield from changes(before, value, f"{path}{name}.")
            elif value != before:
                yield f"{path}{name}={json.dumps(value)}"

    try:
        base = load_config(source)
    except SprawlError:
        return []  # not a file (any more): the run's record has the config
    return list(changes(base.model_dump(mode="json"), config.model_dump(mode="json"), ""))


def _clean_up(attached: Attached, stack: Stack | None) -> None:
    """Stop the run's processes (again: closing is idempotent) and the stack, if it is ours to stop."""
    attached.session.close()
    server.flush()
    if stack is not None:
        stack.down()


def _leave(code: int) -> int:
    """The exit code, which a lost server may not delay."""
    if not server.reachable():
        server.bound_exit(code)
    return code
