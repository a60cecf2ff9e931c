"""Flow: a study, one task run an arm and seed; tables as artifacts, figures in the reports directory."""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.futures import PrefectConcurrentFuture
from prefect.runtime import flow_run

from flows.parameters import Positive
from sprawl.errors import SprawlError
from tasks.artifacts import artifact_key
from tasks.train_arm import train_arm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sprawl.study.job import Job
    from sprawl.study.plan import Cell
    from sprawl.study.process import Processes


def _name() -> str:
    return f"compare-{Path(flow_run.parameters['study']).stem}"


@flow(
    name="compare",
    flow_run_name=_name,
    persist_result=False,
)
def compare(
    study: str = "configs/compare/report.yaml",
    board: str | None = None,
    only: list[str] | None = None,
    seeds: list[int] | None = None,
    parallel: Positive | None = None,
    quick: bool = False,
    out: str | None = None,
) -> dict[str, Any]:
    """Train every arm of a study with every seed and lay them side by side, as `sprawl compare` does.

    Finished runs are reused and stopped ones resumed, so a retry goes on where it was interrupted. A run that fails
    does not keep the others from being trained and compared; the flow run fails at its end.

    Args:
        study: Study YAML, relative to the directory the worker serves; see configs/compare/.
        board: Directory or object-store URL of the runs. Default: $SPRAWL_BOARD, else ./runs.
        only: Names of arms, or patterns. Default: all.
        seeds: Some of the study's seeds. Default: all.
        parallel: Runs at a time. Default: the study's.
        quick: 12 small steps an arm and one seed, under run ids of their own: a check, not a measurement.
        out: Directory for tables and figures. Default: reports/compare/<study>.
    """
    from sprawl.study.job import open_job, write_job_results
    from sprawl.study.process import Processes
    from sprawl.study.runner import prepare

    logger = get_run_logger()
    place = board or os.environ.get("SPRAWL_BOARD", "runs")
    job = open_job(study, place, quick=quick, only=only or (), seeds=seeds or ())
    prepare(job.cells, lambda text: logger.info("%s", text))
    processes = Processes()
    try:
        failed = _train(job, job.cells, parallel or job.study.parallel, processes)
        failed += _train(job, job.timing, 1, processes)
    finally:
        processes.stop()  # nothing is left to stop unless this flow run is being ended
    results, paths = write_job_results(job, Path(out) if out else None)
    for kind, text in results.tables.items():
        create_markdown_artifact(text, key=artifact_key("compare", job.id, kind), description=job.study.title)
    for path in paths:
        logger.info("%s", path)
    for violation in results.violations:
        logger.warning("violation in %s", violation)
    if failed:
        raise SprawlError(f"{len(failed)} of {len(job.cells) + len(job.timing)} runs failed: {'; '.join(failed)}")
    return results.data


def _train(job: Job, cells: Sequence[Cell], parallel: int, processes: Processes) -> list[str]:
    """All of `cells` in order, at most `parallel` task runs at a time; what the failed ones said."""
    from sprawl.study.runner import train_cell

    running: list[PrefectConcurrentFuture[dict[str, Any]]] = []
    every = []
    for cell in cells:
        while len(running) >= parallel:
            wait([future.wrapped_future for future in running], return_when=FIRST_COMPLETED)
            running = [future for future in running if not future.wrapped_future.done()]
        train = partial(train_cell, cell, job.board, job.study, processes)
        future = train_arm.submit(cell.run_id, train)
        assert isinstance(future, PrefectConcurrentFuture), "flows run their tasks in threads unless told otherwise"
        running.append(future)
        every.append(future)
    failed = []
    for future in every:
        future.wait()
        if not future.state.is_completed():
            failed.append(str(future.state.message))
    return failed
