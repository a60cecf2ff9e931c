"""Task: have the islands sample the batch of one optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from sprawl.errors import ConfigError, Diverged, FencedError, IntegrityError

if TYPE_CHECKING:
    from sprawl.run.session import RunSession

HOPELESS = (ConfigError, Diverged, FencedError, IntegrityError)


def worth_retrying(_task: Any, _run: TaskRun, state: State) -> bool:
    """Whether another try can help: not when this writer was fenced off or bytes are wrong."""
    return not isinstance(state.result(raise_on_failure=False), HOPELESS)


@task(
    name="collect-rollouts",
    task_run_name="collect-rollouts-{step}",
    retries=2,  # safe: a batch that reached the board is reused, not sampled again
    retry_delay_seconds=[1, 5],
    retry_condition_fn=worth_retrying,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def collect_rollouts(session: RunSession, step: int) -> dict[str, Any]:
    """Returns a CollectReceipt as a dict. The samples stay in the session and on the board."""
    return session.collect(step).as_dict()
