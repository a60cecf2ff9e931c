"""Task: publish the weights of one step as a version and commit the step to the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

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
def publish_version(session: RunSession, step: int) -> dict[str, Any]:
    """Returns a PublishReceipt as a dict, and emits `sprawl.version.published` for deployments to trigger on."""
    receipt = session.publish(step).as_dict()
    emit_event(
        event="sprawl.version.published",
        resource={"prefect.resource.id": f"sprawl.run.{session.run_id}", "prefect.resource.name": session.run_id},
        payload=receipt,
    )
    return receipt
