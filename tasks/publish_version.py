"""Task: publish the weights of one step as a version and commit the step to the ledger."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.events import Announcer

if TYPE_CHECKING:
    from sprawl.run.session import RunSession


@task(
    name="publish-version",
    task_run_name="publish-version-{step}",
    retries=2,  # safe: publishing the same state under the same version again is a no-op
    retry_delay_seconds=[1, 5],
    cache_policy=NO_CACHE,
    persist_result=False,
)
def publish_version(session: RunSession, step: int, announcer: Announcer) -> dict[str, Any]:
    """Returns a PublishReceipt as a dict, and tells of the version (`sprawl.version.published`)."""
    receipt = session.publish(step).as_dict()
    announcer.version(receipt["version"], time.time(), step=receipt["step"], kind=receipt["kind"])
    return receipt
