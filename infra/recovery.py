"""Flow runs that died: found, marked as crashed, and started again.

Two automations do it on the server. `RESUME` starts the deployment of a crashed post-train flow run again with the same
parameters, which name its run; `ZOMBIE` marks a flow run as crashed that has sent no heartbeat for two minutes. Both
live on events, and events can be lost with the server that carries them. What they missed is found by `reconcile` on
the machine where the flow runs are processes: it needs no events, and a process is there or it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from infra.limits import MAX_ATTEMPTS, SEGMENT

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.events.schemas.automations import AutomationCore

RESUME = "sprawl: start crashed runs again"
ZOMBIE = "sprawl: flow runs without a heartbeat have crashed"
HEARTBEAT_S = 30
SILENCE_S = 4 * HEARTBEAT_S
AGAIN_AFTER_S = 10.0  # whatever made it crash gets a moment to go away
UNSEEN_S = 60.0  # after which a crash that nobody acted on was missed; a pending flow run that has no process is stuck

# What the next flow run gets of the crashed one's parameters. `attempt` has a maximum in the deployment's schema: that
# is where a flow run that crashes before it runs a line of ours stops being started again.
CARRIED: Mapping[str, Any] = {
    "config": "configs/tiny.yaml",
    "resume": None,
    "board": None,
    "run_id": None,
    "overrides": None,
    "fleet": "local",
    "segment": SEGMENT,
}


def again(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the flow run that goes on after a crashed one."""
    kept = {name: parameters.get(name, default) for name, default in CARRIED.items()}
    return {**kept, "attempt": int(parameters.get("attempt") or 0) + 1}


def templates() -> dict[str, str]:
    """`again` for Prefect's template engine. Each is a single expression, to which the engine appends `| tojson`, so
    that types survive; that binds tighter than `+`, hence the outer brackets."""
    kept = {name: f"{{{{ flow_run.parameters.get('{name}', {default!r}) }}}}" for name, default in CARRIED.items()}
    return {**kept, "attempt": "{{ ((flow_run.parameters.get('attempt') or 0) + 1) }}"}


def automations(
    post_train: Iterable[UUID], flows: Iterable[UUID], silence_s: float = SILENCE_S
) -> list[AutomationCore]:
    """Both automations. `post_train`: deployments whose crashed flow runs are started again; `flows`: those watched,
    also where a terminal runs them; `silence_s`: seconds without a heartbeat."""
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState, RunDeployment
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture, ResourceSpecification

    def of(role: str, ids: Iterable[UUID]) -> ResourceSpecification:
        names = sorted(f"prefect.{role}.{item}" for item in ids)
        return ResourceSpecification({"prefect.resource.role": role, "prefect.resource.id": names})

    flow_runs = ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"})
    beat = "prefect.flow-run.heartbeat"
    ends = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed", "Suspended")}
    return [
        AutomationCore(
            name=RESUME,
            description=f"At most {MAX_ATTEMPTS} times in a row; the flow gives up earlier when no step is made.",
            trigger=EventTrigger(
                expect={"prefect.flow-run.Crashed"},
                match=flow_runs,
                match_related=of("deployment", post_train),
                for_each={"prefect.resource.id"},
                posture=Posture.Reactive,
                threshold=1,
                within=timedelta(0),
            ),
            actions=[
                RunDeployment(
                    source="inferred", parameters=templates(), schedule_after=timedelta(seconds=AGAIN_AFTER_S)
                )
            ],
        ),
        AutomationCore(
            name=ZOMBIE,
            description="A flow run that goes on all the same is fenced off by its successor and writes nothing more.",
            trigger=EventTrigger(
                after={beat},
                expect={beat, *ends},
                match=flow_runs,
                match_related=of("flow", flows),
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(seconds=silence_s),
            ),
            actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"No heartbeat for {silence_s:g} seconds.")],
        ),
    ]


def install(client: SyncPrefectClient, wanted: Sequence[AutomationCore]) -> None:
    """Create what is missing, update what differs; one that a person has switched off stays off."""
    for automation in wanted:
        found = client.read_automations_by_name(automation.name)
        if not found:
            client.create_automation(automation)
            continue
        first, *rest = found
        for surplus in rest:
            client.delete_automation(surplus.id)
        kept = automation.model_copy(update={"enabled": first.enabled})
        if _said(kept) != _said(first):
            client.update_automation(first.id, kept)


def _said(automation: AutomationCore) -> dict[str, Any]:
    said = automation.model_dump(mode="json", include={"name", "description", "enabled", "trigger", "actions"})
    said["trigger"].pop("id", None)
    return said


# ---------------------------------------------------------------- what the events missed


@dataclass(frozen=True)
class Seen:
    """A flow run of the local pool as the server tells it. `since_s`: seconds in this state."""

    id: UUID
    deployment_id: UUID | None
    state: str
    since_s: float
    created: datetime
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """crashed: their process is gone. stuck: a worker took them and died. missed: crashed, and nobody went on."""

    crashed: tuple[UUID, ...] = ()
    stuck: tuple[UUID, ...] = ()
    missed: tuple[Seen, ...] = ()


def plan(seen: Sequence[Seen], alive: Iterable[str], resumable: Iterable[UUID]) -> Plan:
    """What to put right. `alive`: flow runs that have a process on this machine; `resumable`: deployments."""
    living, again_by = set(alive), set(resumable)
    dead = [run for run in seen if str(run.id) not in living]
    return Plan(
        crashed=tuple(run.id for run in dead if run.state in ("RUNNING", "CANCELLING")),
        stuck=tuple(run.id for run in dead if run.state == "PENDING" and run.since_s > UNSEEN_S),
        missed=tuple(
            run
            for run in seen
            if run.state == "CRASHED"
            and run.deployment_id in again_by
            and run.since_s > UNSEEN_S
            and int(run.parameters.get("attempt") or 0) < MAX_ATTEMPTS
            and not any(_follows(other, run) for other in seen)
        ),
    )


def _follows(other: Seen, crashed: Seen) -> bool:
    """Whether a later flow run is about the same run: nobody has to go on after `crashed` any more."""
    if other.id == crashed.id or other.deployment_id != crashed.deployment_id or other.created <= crashed.created:
        return False
    return _run_of(other.parameters) == _run_of(crashed.parameters)


def _run_of(parameters: Mapping[str, Any]) -> Any:
    """The run that parameters are about; before the flow has named it, what it would be made from."""
    named = parameters.get("resume") or parameters.get("run_id")
    return named or (parameters.get("config"), str(parameters.get("overrides")), parameters.get("board"))


def read_seen(client: SyncPrefectClient, pool: str, now: datetime) -> list[Seen]:
    """The flow runs of a pool that are under way, and those that crashed or began in the last three days."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterExpectedStartTime, WorkPoolFilter
    from prefect.client.schemas.filters import WorkPoolFilterName as Name
    from prefect.client.schemas.sorting import FlowRunSort

    since = FlowRunFilter(expected_start_time=FlowRunFilterExpectedStartTime(after_=now - timedelta(days=3)))
    under_way = FlowRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}})
    found: dict[UUID, FlowRun] = {}
    for wanted in (since, under_way):
        runs = client.read_flow_runs(
            work_pool_filter=WorkPoolFilter(name=Name(any_=[pool])),
            flow_run_filter=wanted,
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=200,
        )
        found.update((run.id, run) for run in runs)
    return [_seen(run, now) for run in found.values() if run.state is not None]


def _seen(run: FlowRun, now: datetime) -> Seen:
    assert run.state is not None
    since = (now - run.state.timestamp).total_seconds()
    return Seen(run.id, run.deployment_id, run.state.type.value, since, run.created or now, run.parameters)


def reconcile(client: SyncPrefectClient, pool: str, alive: Iterable[str], resumable: Iterable[UUID]) -> list[str]:
    """Put right what the events missed; says what it did, a line each. Safe to repeat."""
    from prefect.client.schemas.objects import StateType
    from prefect.states import Crashed, Scheduled

    now = datetime.now(UTC)
    todo = plan(read_seen(client, pool, now), alive, resumable)
    said = []
    for flow_run_id in todo.crashed:
        run = client.read_flow_run(flow_run_id)  # it may have ended in order since it was listed
        if run.state is not None and run.state.type in (StateType.RUNNING, StateType.CANCELLING):
            client.set_flow_run_state(flow_run_id, Crashed(message="Its process is gone."), force=True)
            said.append(f"flow run {run.name} has no process any more: marked as crashed")
    for flow_run_id in todo.stuck:
        client.set_flow_run_state(flow_run_id, Scheduled(message="The worker that took it is gone."), force=True)
        said.append(f"flow run {flow_run_id} was taken by a worker that died: scheduled again")
    automation = client.read_automations_by_name(RESUME)
    for missed in todo.missed if automation and automation[0].enabled else ():
        assert missed.deployment_id is not None
        created = client.create_flow_run_from_deployment(
            missed.deployment_id, parameters=again(missed.parameters), idempotency_key=f"again:{missed.id}"
        )
        said.append(f"nobody had gone on after crashed flow run {missed.id}: started {created.name}")
    return said
