"""Task: one optimizer step on the collected batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

if TYPE_CHECKING:
    from sprawl.run.session import RunSession


# No retries: a failed step may have touched the optimizer; the run resumes from its board instead.
@task(name="train-step", task_run_name="train-step-{step}", cache_policy=NO_CACHE, persist_result=False)
def train_step(session: RunSession, step: int) -> dict[str, Any]:
    """Returns a TrainReceipt as a dict."""
    return session.train(step).as_dict()
