"""Trains the cells of a study: finished ones are reused, stopped ones resumed, one that crashes is tried once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sprawl.report.data import RunData
from sprawl.study.board import find_cell, keep_ledger_only, open_board
from sprawl.study.config import StudyConfig
from sprawl.study.measures import gave_up
from sprawl.study.plan import Cell
from sprawl.study.process import Processes, run_command

ATTEMPTS = 2
_POLL_S = 0.5  # between looks for Ctrl-C
_FINISHED = (0, 1)  # 1: finished with violations, which belong in the table

Note = Callable[[str], None]
Status = Literal["reused", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How a cell ended. `data` is what its ledger has, None when the run never began; `message` says why it failed.

    stopped: the run gave itself up, which is a result; resuming it would end in the same place.
    """

    cell: Cell
    status: Status
    data: RunData | None
    message: str = ""


def log_path(cell: Cell) -> Path:
    """Where a cell's output goes, beside the logs of its islands."""
    return Path.cwd() / ".sprawl" / "logs" / cell.run_id / "run.log"


def train_cell(cell: Cell, board: str, study: StudyConfig, processes: Processes, note: Note) -> Outcome:
    """Bring one cell to its last step. Never raises for a run that fails: the other cells go on."""
    known = find_cell(open_board(board), cell)
    if known is not None and (known.finished or gave_up(known)):
        note(f"{cell.name} | {cell.run_id} had {'finished' if known.finished else 'stopped by itself'}: reused")
        return Outcome(cell, "reused", known)
    why = ""
    for attempt in range(1, ATTEMPTS + 1):
        command = run_command(cell, board, resume=known is not None)
        code, tail = processes.run(command, log_path(cell), lambda line: note(f"{cell.name} | {line}"))
        store = open_board(board)
        known = find_cell(store, cell)
        if code in _FINISHED and known is not None and known.finished:
            if study.keep == "ledger" and store is not None:
                keep_ledger_only(store, cell.run_id)
            return Outcome(cell, "finished", known)
        if known is not None and gave_up(known):
            return Outcome(cell, "stopped", known)
        why = _why(code, tail)
        if processes.stopping:
            break
        again = "trying once more" if attempt < ATTEMPTS else f"given up; its output is in {log_path(cell)}"
        note(f"{cell.name} | {why}: {again}")
    return Outcome(cell, "failed", known, why)


def prepare(cells: Sequence[Cell], note: Note) -> None:
    """Have every base model there before runs start side by side: each would convert it for itself.

    Raises SprawlError when one cannot be had.
    """
    from sprawl.policy.fetch import ensure_base

    for base in sorted({cell.config.policy.base for cell in cells}):
        ensure_base(base, Path("models"), note)


def train_cells(cells: Sequence[Cell], board: str, study: StudyConfig, parallel: int, note: Note) -> list[Outcome]:
    """All cells, at most `parallel` at a time, in order; outcomes in the order of the cells.

    On Ctrl-C or SIGTERM every run is stopped in order (call it inside `terminate_as_interrupt`) and KeyboardInterrupt
    raised; what was committed is on the board.
    """
    processes = Processes()
    with ThreadPoolExecutor(max_workers=parallel, thread_name_prefix="cell") as pool:
        try:
            futures = [pool.submit(train_cell, cell, board, study, processes, note) for cell in cells]
            _wait_for(futures, note)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.stop()
            raise
    return [future.result() for future in futures]


def _wait_for(futures: Sequence[Future[Outcome]], note: Note) -> None:
    """Until all are done. Raises what one raised (a board that went away), and lets signals in meanwhile."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, _POLL_S, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        if done:
            note(f"{len(futures) - len(pending)} of {len(futures)} runs done")


def _why(code: int, tail: Sequence[str]) -> str:
    """The run's own last word, if it had one."""
    said = [line.removeprefix("sprawl: ") for line in tail if line.startswith("sprawl: ")]
    how = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"{how} ({said[-1]})" if said else how


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    return [f"{outcome.cell.run_id}: {outcome.message}" for outcome in outcomes if outcome.status == "failed"]
