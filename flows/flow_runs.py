"""What the post-train flow asks and tells the Prefect server about its own flow run and the others of its run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.states import Scheduled

from flows.lineage import Link, chain_markdown, run_tag
from flows.server import flow_run_url
from tasks.artifacts import ArtifactGate, ArtifactWriter, artifact_key

HAND_OVER_S = 10.0  # between the end of a segment and the start of the next: islands end, the queue's place comes free
PATIENCE_S = 60.0
CHAIN_LIMIT = 100


class ThisFlowRun:
    """The flow run that this process is in."""

    def __init__(self) -> None:
        context = FlowRunContext.get()
        assert context is not None, "called in a flow run only"
        assert context.flow_run is not None, "called in a flow run only"
        assert isinstance(context.client, SyncPrefectClient), "of a flow that is not async"
        self._run: FlowRun = context.flow_run
        self._client: SyncPrefectClient = context.client

    @property
    def id(self) -> str:
        return str(self._run.id)

    @property
    def deployment_id(self) -> UUID | None:
        return self._run.deployment_id

    @property
    def retried(self) -> bool:
        """Whether this is the same flow run once more (Prefect's own retry)."""
        return (self._run.run_count or 1) > 1

    def claim(self, run_id: str, parameters: Mapping[str, Any] | None = None) -> None:
        """Say which run this is, before anything of it exists: by tag, and in the parameters, so that whoever starts
        this flow run again (an automation, a person in the UI) goes on with the same run."""
        tags = sorted({*self._run.tags, run_tag(run_id)})
        self._client.update_flow_run(
            self._run.id, tags=tags, parameters=None if parameters is None else dict(parameters)
        )

    def rename(self, name: str) -> None:
        """The view of a run is never a reason to fail it."""
        with contextlib.suppress(Exception):
            self._client.set_flow_run_name(self._run.id, name)

    def rival(self, run_id: str, patience_s: float = PATIENCE_S) -> FlowRun | None:
        """Another flow run that trains the same run and began before this one; None when there is none, or it ends
        within `patience_s`, as the one does that has just handed over."""
        deadline = time.monotonic() + patience_s
        while (found := self._rival(run_id)) is not None and time.monotonic() < deadline:
            time.sleep(2.0)
        return found

    def _rival(self, run_id: str) -> FlowRun | None:
        running = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING]))
        found = self._client.read_flow_runs(
            flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[run_tag(run_id)]), state=running),
            sort=FlowRunSort.START_TIME_ASC,
        )
        return next((run for run in found if run.id != self._run.id and _precedes(run, self._run)), None)

    def successor(self, run_id: str, after_step: int, parameters: Mapping[str, Any]) -> str:
        """Have the same deployment go on with the run; asking twice is asking once. Returns the flow run's address.

        Raises what the client raises when the server cannot be asked, and ValueError without a deployment.
        """
        if self._run.deployment_id is None:
            raise ValueError("this flow run has no deployment")
        created = self._client.create_flow_run_from_deployment(
            self._run.deployment_id,
            parameters=dict(parameters),
            state=Scheduled(scheduled_time=datetime.now(UTC) + timedelta(seconds=HAND_OVER_S)),
            idempotency_key=f"{run_id}:{after_step}",
            tags=[run_tag(run_id)],
        )
        return flow_run_url(str(created.id))


def _precedes(other: FlowRun, mine: FlowRun) -> bool:
    """Of two flow runs that start at the same moment exactly one gives way."""
    begun = other.start_time or other.created, mine.start_time or mine.created
    if begun[0] is None or begun[1] is None or begun[0] == begun[1]:
        return str(other.id) < str(mine.id)
    return begun[0] < begun[1]


def read_chain(client: SyncPrefectClient, run_id: str) -> list[Link]:
    """The newest flow runs of a run, oldest first."""
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[run_tag(run_id)])),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=CHAIN_LIMIT,
    )
    return [_link(run) for run in reversed(found)]


def write_chain(run_id: str, gate: ArtifactGate, flow_run_id: str) -> bool:
    """Show the flow runs of a run as an artifact that replaces itself. Returns at once; False when it was dropped."""
    writer = ArtifactWriter(flow_run_id)

    def write() -> None:
        with get_client(httpx_settings={"timeout": 10.0}, sync_client=True) as client:
            text = chain_markdown(run_id, read_chain(client, run_id))
        writer.markdown(artifact_key("chain", run_id), text, f"Flow runs of {run_id}")

    return gate.submit(write)


def _link(run: FlowRun) -> Link:
    begun = run.start_time or run.expected_start_time
    return Link(
        name=run.name,
        url=flow_run_url(str(run.id)),
        state=run.state_name or "",
        attempt=int(run.parameters.get("attempt") or 0),
        started="" if begun is None else f"{begun:%Y-%m-%d %H:%M:%S}",
    )
