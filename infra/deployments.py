"""What can be run: flows, where they run, and how many at a time. Registered through Prefect's client.

`prefect.yaml` declares the same deployments for `prefect deploy --all` (a server elsewhere), `prefect.sky.yaml` those
of the SkyPilot work pool; a test keeps them equal. Registering them in this process takes a second, the command line
takes several.

How many flow runs at a time is a matter of work queues. Prefect's own limit of a deployment holds a lease that the flow
run must renew: a server that restarts or is away at that moment ends the flow run, and with it the training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from infra import recovery, watch

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

LOCAL_POOL, LOCAL_TYPE = "local", "process"
SKY_POOL, SKY_TYPE = "sky", "skypilot"
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Queue:
    """A work queue of every pool; `limit`: flow runs at a time, the others wait their turn."""

    name: str
    limit: int
    description: str


TRAIN = Queue("train", 1, "One run trains at a time: it fills the machine. The next one starts when it is done.")
AROUND = Queue("around", 2, "Beside a run: evaluations, anchors, promotions.")
FLEET = Queue("fleet", 1, "Looks at the islands of runs, one at a time: they must not overlap.")
QUEUES = (TRAIN, AROUND, FLEET)


@dataclass(frozen=True)
class Schedule:
    """Shipped switched off: a person turns it on in the UI."""

    cron: str
    slug: str


@dataclass(frozen=True)
class Deployment:
    """One deployment of one flow. `entrypoint` is a module path, so that any working directory will do."""

    entrypoint: str
    description: str
    name: str = "local"
    pool: str = LOCAL_POOL
    queue: Queue = AROUND
    parameters: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    job_variables: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    schedules: tuple[Schedule, ...] = ()
    tags: tuple[str, ...] = ("sprawl",)

    @property
    def here(self) -> bool:
        """Whether its flow runs are processes of this machine's worker, which start in a directory of ours."""
        return self.pool == LOCAL_POOL


POST_TRAIN = "flows.post_train.post_train"
MINUTELY = Schedule("* * * * *", "minutely")

DEPLOYMENTS = (
    Deployment(
        POST_TRAIN,
        "Post-train a model: one run, from its YAML or resumed from its board. Starts islands and anchor here.",
        queue=TRAIN,
        parameters=MappingProxyType({"config": "configs/tiny.yaml"}),
    ),
    Deployment(
        "flows.anchor.anchor",
        "The anchor circuit of a run that trains elsewhere: follows the board, fires every c steps, ends with the run.",
        parameters=MappingProxyType({"run_id": "latest"}),
    ),
    Deployment(
        "flows.evaluate.evaluate",
        "Greedy evaluation of one published version of a run.",
        parameters=MappingProxyType({"run_id": "latest"}),
        schedules=(Schedule("0 * * * *", "hourly"),),
    ),
    Deployment(
        "flows.compare.compare",
        "Matched arms of a study, several seeds each: trained, then laid side by side in one table and its figures.",
        queue=TRAIN,
        parameters=MappingProxyType({"study": "configs/compare/report.yaml"}),
    ),
    Deployment(
        "flows.promote.promote",
        "A person decides whether a version is promoted: shows the facts, waits for the form, writes the answer down.",
        parameters=MappingProxyType({"run_id": "latest"}),
    ),
    Deployment(
        "flows.fleet.fleet",
        "One look at the islands of a run whose fleet is none: starts, drains and replaces processes of this machine.",
        queue=FLEET,
        parameters=MappingProxyType({"run_id": "latest", "machines": "local"}),
        schedules=(MINUTELY,),
    ),
)

# The same flows on machines that SkyPilot finds. Their board has to be one that those machines reach.
SKY_DEPLOYMENTS = (
    Deployment(
        POST_TRAIN,
        "Post-train on a machine that SkyPilot finds. The board must be an object store.",
        name="sky",
        pool=SKY_POOL,
        queue=TRAIN,
        parameters=MappingProxyType({"config": "configs/smollm2.yaml"}),
        job_variables=MappingProxyType({"accelerators": "H100:1", "use_spot": True}),
    ),
    Deployment(
        "flows.anchor.anchor",
        "The anchor circuit of a run on a machine of its own that SkyPilot finds.",
        name="sky",
        pool=SKY_POOL,
        parameters=MappingProxyType({"run_id": "latest"}),
        job_variables=MappingProxyType({"accelerators": "L4:1", "use_spot": True}),
    ),
    Deployment(
        "flows.evaluate.evaluate",
        "Greedy evaluation of one published version on a machine that SkyPilot finds.",
        name="sky",
        pool=SKY_POOL,
        parameters=MappingProxyType({"run_id": "latest"}),
        job_variables=MappingProxyType({"accelerators": "L4:1", "use_spot": True}),
    ),
    # A look takes seconds and only asks SkyPilot: it needs no machine of its own.
    Deployment(
        "flows.fleet.fleet",
        "One look at the islands of a run: starts, drains and replaces managed jobs of SkyPilot.",
        name="sky",
        queue=FLEET,
        parameters=MappingProxyType({"run_id": "latest", "machines": "sky"}),
        schedules=(MINUTELY,),
    ),
)


@dataclass(frozen=True)
class Registered:
    """Deployments by `flow/name`, their flows, and what a person should know about those that are missing."""

    ids: dict[str, UUID]
    flows: frozenset[UUID]
    notes: tuple[str, ...] = ()


def register(directory: Path) -> Registered:
    """Create or update work pool, queues, deployments, automations and alerts on the server of the current settings.

    `directory` is where local flow runs start: relative paths of configs and boards mean what they mean there. The
    deployments for SkyPilot are registered where their pool exists; their flow runs start where its machines put them.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
    from prefect.workers.process import ProcessWorker

    notes: tuple[str, ...] = ()
    with get_client(sync_client=True) as client:
        with contextlib.suppress(ObjectAlreadyExists):
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=LOCAL_POOL, type=LOCAL_TYPE, base_job_template=template))
        _make_queues(client, LOCAL_POOL)
        made = [_create(client, deployment, directory) for deployment in DEPLOYMENTS]
        try:
            client.read_work_pool(SKY_POOL)
        except ObjectNotFound:
            notes = (f"no work pool {SKY_POOL!r}: the deployments for SkyPilot are left out",)
        else:
            _make_queues(client, SKY_POOL)
            made += [_create(client, item, directory if item.here else None) for item in SKY_DEPLOYMENTS]
        ids = {name: deployment for name, deployment, _ in made}
        flows = frozenset(flow for _, _, flow in made)
        resumed = [ids[name] for name in ids if name.startswith("post-train/")]
        recovery.install(client, recovery.automations(resumed, flows))
        watch.install(client)
    return Registered(ids, flows, notes)


def flow_of(deployment: Deployment) -> Any:
    module, _, attribute = deployment.entrypoint.rpartition(".")
    return getattr(import_module(module), attribute)


def _make_queues(client: SyncPrefectClient, pool: str) -> None:
    """A limit that somebody changed in the UI stays as it is."""
    from prefect.exceptions import ObjectAlreadyExists

    for queue in QUEUES:
        with contextlib.suppress(ObjectAlreadyExists):
            client.create_work_queue(
                name=queue.name, description=queue.description, concurrency_limit=queue.limit, work_pool_name=pool
            )


def _create(client: SyncPrefectClient, deployment: Deployment, directory: Path | None) -> tuple[str, UUID, UUID]:
    """Name, id of the deployment, id of its flow."""
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.utilities.callables import parameter_schema

    flow = flow_of(deployment)
    there = None if directory is None else str(directory)
    pull = None if there is None else [{"prefect.deployments.steps.set_working_directory": {"directory": there}}]
    # One that a person has switched on stays on.
    kept = _active_schedules(client, f"{flow.name}/{deployment.name}")
    schedules = [
        DeploymentScheduleCreate(
            schedule=CronSchedule(cron=item.cron, timezone="UTC"), active=item.slug in kept, slug=item.slug
        )
        for item in deployment.schedules
    ]
    flow_id = client.create_flow_from_name(flow.name)
    created = client.create_deployment(
        flow_id=flow_id,
        name=deployment.name,
        description=deployment.description,
        entrypoint=deployment.entrypoint,
        path=there,
        pull_steps=pull,
        work_pool_name=deployment.pool,
        work_queue_name=deployment.queue.name,
        parameters=dict(deployment.parameters),
        job_variables=dict(deployment.job_variables),
        schedules=schedules,
        parameter_openapi_schema=parameter_schema(flow.fn).model_dump_for_openapi(),
        enforce_parameter_schema=True,
        tags=list(deployment.tags),
    )
    return f"{flow.name}/{deployment.name}", created, flow_id


def _active_schedules(client: SyncPrefectClient, name: str) -> set[str]:
    from prefect.exceptions import ObjectNotFound

    try:
        found = client.read_deployment_by_name(name)
    except ObjectNotFound:
        return set()
    return {item.slug for item in found.schedules if item.active and item.slug}
