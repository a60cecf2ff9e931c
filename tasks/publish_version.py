"""Task: publish the weights of one step as a version and commit the step to the ledger."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

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
def publish_version(session: RunSession, step: int, announcer: Announcer) -> None:
    """Tells of the version, too (`sprawl.version.published`)."""
    receipt = session.publish(step)
    announcer.version(receipt.version, time.time(), step=receipt.step, kind=receipt.kind)
