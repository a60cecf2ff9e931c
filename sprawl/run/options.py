"""What a caller (terminal, Prefect flow) decides about a run besides its config."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from sprawl.config import RunConfig


@dataclass(frozen=True)
class RunOptions:
    config: RunConfig | None  # None when resuming: the run's own record has it
    config_source: str  # shown to the user in "how to resume"
    board: str  # absolute directory or URL
    run_id: str | None = None  # wanted id of a new run; made up when None
    resume: str | None = None  # run id, or "latest"
    fleet: str = "local"
    log_dir: Path | None = None  # default: <cwd>/.sprawl/logs/<run_id>
    page: bool = True  # the HTML report at the end
    metrics: str | None = None  # HOST:PORT of the Prometheus endpoint; None: SPRAWL_METRICS if that is free, else none


def absolute_board(board: str) -> str:
    """Board URLs stay as they are; directories become absolute, so that every process finds the same one."""
    return board if "://" in board else os.path.abspath(board)


def new_run_id(name: str) -> str:
    """`<name>-<UTC date>-<UTC time>`: sorts by age, readable in the UI."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
