"""Flow: the anchor circuit of one run, off the critical path. `python -m flows.anchor` runs it in this process.

Every fire is a task run; waiting for the next one creates none. The anchor needs Prefect for nothing but the view:
without a server, or when the server goes away, it fires all the same.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import click
from prefect import flow
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment
from prefect.states import Cancelled, State

from flows.server import bound_exit, reachable
from sprawl.board.records import FireRecord
from tasks.fire_anchor import fire_anchor

logger = logging.getLogger(__name__)

STOPPED = 143  # exit code of a process ended by SIGTERM


def _never() -> bool:
    return False


SHOULD_STOP: ContextVar[Callable[[], bool]] = ContextVar("should_stop", default=_never)


@flow(name="anchor", flow_run_name="anchor-{run_id}", persist_result=False)
def anchor(run_id: str = "latest", board: str | None = None) -> dict[str, Any] | State[Any]:
    """Follow a run on its board and fire every c steps, until the run needs no further fire.

    Args:
        run_id: Run to serve ("latest" for the newest one on the board).
        board: Directory or object-store URL of the run. Default: $SPRAWL_BOARD, else ./runs.
    """
    fires = 0

    def fire(service: Any, step: int) -> FireRecord:
        nonlocal fires
        fire_anchor(service, step)
        fires += 1
        committed: FireRecord = service.fire(step)  # what is committed is returned as it is
        return committed

    try:
        follow(run_id, board, fire)
    except (KeyboardInterrupt, TerminationSignal):
        if deployment.id:
            raise  # the worker that sent the signal reports the state
        return Cancelled(message=f"Stopped with its run after {fires} fires")
    return {"run_id": run_id, "fires": fires}


def follow(run_id: str, board: str | None, fire: Callable[[Any, int], FireRecord]) -> None:
    """Serve the anchor until the run needs no further fire; `fire(service, step)` does one."""
    import torch

    from sprawl.anchor.service import AnchorService, serve
    from sprawl.board.ledger import resolve_run
    from sprawl.board.store import open_store

    place = board or os.environ.get("SPRAWL_BOARD", "runs")
    service = AnchorService(place, resolve_run(open_store(place), run_id))
    torch.set_num_threads(service.config.threads.anchor)
    serve(service, lambda step: fire(service, step), SHOULD_STOP.get())


@click.command()
@click.option("--board", envvar="SPRAWL_BOARD", default="runs", show_default=True, help="Board URL or directory.")
@click.option("--run-id", default="latest", show_default=True, help="Run to serve.")
@click.option("--exit-with-parent", is_flag=True, help="End when the process that started this one is gone.")
def main(board: str, run_id: str, exit_with_parent: bool) -> None:
    """Serve the anchor circuit of a run as a Prefect flow run in this process.

    Talks to the server of the Prefect settings (PREFECT_API_URL); when none answers it serves the run without one.
    """
    parent = os.getppid()
    before = SHOULD_STOP.set(lambda: exit_with_parent and os.getppid() != parent)
    try:
        _serve(board, run_id)
    finally:
        SHOULD_STOP.reset(before)


def _serve(board: str, run_id: str) -> None:
    if reachable():
        try:
            state = anchor(run_id, board, return_state=True)
            if state.is_cancelled():
                sys.exit(STOPPED)  # not 0: whoever watches must not take it for an anchor that is done
            state.result()  # raises what the flow raised
            return
        except Exception as error:
            if reachable():
                raise
            logger.warning("the Prefect server went away (%s): the anchor goes on without it", error)
    follow(run_id, board, lambda service, step: service.fire(step))
    bound_exit(0)


if __name__ == "__main__":
    main()
