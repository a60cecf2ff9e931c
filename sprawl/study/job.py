"""A study that is about to be worked on: read, planned and held against its board. Shared by command and flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sprawl.report.data import RunData
from sprawl.run.options import absolute_board
from sprawl.study.board import check_definitions, open_board
from sprawl.study.config import StudyConfig, load_study
from sprawl.study.plan import Cell, plan_cells, plan_timing, study_id
from sprawl.study.results import Results, make_results, write_results
from sprawl.study.timing import with_measured_seconds


@dataclass(frozen=True)
class Job:
    """`known` is what was on the board when the job was opened, by run id. `timing`: short runs, one at a time."""

    study: StudyConfig
    cells: tuple[Cell, ...]
    timing: tuple[Cell, ...]
    board: str
    quick: bool
    known: Mapping[str, RunData]

    @property
    def id(self) -> str:
        return study_id(self.study, self.quick)


def open_job(
    path: str | Path, board: str, *, quick: bool = False, only: Sequence[str] = (), seeds: Sequence[int] = ()
) -> Job:
    """Everything that can be wrong is found here, before the first step of the first arm.

    Raises ConfigError: the study file, a config of any arm, a name that no arm has, or a run on the board that was made
    with another definition; BoardError when the board cannot be reached.
    """
    study = load_study(path)
    cells = plan_cells(study, quick=quick, only=only, seeds=seeds)
    timing = plan_timing(study, quick=quick, only=only)
    board = absolute_board(board)
    known = check_definitions(open_board(board), [*cells, *timing])
    return Job(study, tuple(cells), tuple(timing), board, quick, known)


def write_job_results(job: Job, out: Path | None) -> tuple[Results, list[Path]]:
    """Tables and figures of what is on the board by now; default place: reports/compare/<study>.

    Raises SprawlError when no run has a step yet, or nothing can be written there.
    """
    known = check_definitions(open_board(job.board), [*job.cells, *job.timing])
    known = with_measured_seconds(job.study, known, job.cells, job.timing)
    results = make_results(job.study, job.cells, known, quick=job.quick)
    return results, write_results(results, out or Path("reports") / "compare" / job.id)
