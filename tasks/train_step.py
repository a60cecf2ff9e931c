"""Task: one optimizer step, from its batch to the new weights.

Waiting for the batch is part of it: islands sample all the time, so most steps find theirs on the board, and a task run
of its own costs more than finding it. How long each part took is in the step's record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.retrying import only_once, worth_retrying

if TYPE_CHECKING:
    from sprawl.run.session import RunSession


@task(
    name="train-step",
    task_run_name="train-step-{step}",
    retries=2,  # of collecting: a batch that reached the board is reused, not sampled again
    retry_delay_seconds=[1, 5],
    retry_condition_fn=worth_retrying,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def train_step(session: RunSession, step: int) -> None:
    """The samples and the new weights stay in the session.

    Returns nothing, like every task of a step: Prefect keeps track of each result until its flow run ends.
    """
    session.collect(step)
    with only_once():  # a failed step may have touched the optimizer: the run resumes from its board instead
        session.train(step)
