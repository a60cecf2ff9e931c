"""Task: greedy evaluation of the version a step published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE

if TYPE_CHECKING:
    from collections.abc import Callable

    from sprawl.board.records import EvaluationRecord
    from sprawl.run.session import RunSession


@task(
    name="evaluate-version",
    task_run_name="evaluate-version-{step}",
    retries=1,  # safe: greedy decoding at an exact version
    retry_delay_seconds=1,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def evaluate_version(session: RunSession, step: int, tell: Callable[[EvaluationRecord], None]) -> None:
    """`tell` is called with what came out, once."""
    tell(session.evaluate(step))
