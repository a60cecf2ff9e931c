"""Task: one run of a study, from wherever it is to its last step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from sprawl.errors import SprawlError

if TYPE_CHECKING:
    from sprawl.study.runner import Note, Outcome


@task(name="train-arm", task_run_name="{run_id}", cache_policy=NO_CACHE, persist_result=False)
def train_arm(run_id: str, train: Callable[[Note], Outcome]) -> dict[str, Any]:
    """Reuse, resume or start the run in a process of its own, as `train` does; its progress goes to the task's log.

    Raises SprawlError when it did not get to its last step.
    """
    logger = get_run_logger()
    outcome = train(lambda line: logger.info("%s", line))
    if outcome.status == "failed":
        raise SprawlError(f"{run_id}: {outcome.message}")
    return {"run_id": run_id, "status": outcome.status, "steps": outcome.data.last_step if outcome.data else 0}
