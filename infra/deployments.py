"""What the local stack offers to run: the process work pool and the deployments, registered through Prefect's client.

`prefect.yaml` declares the same deployments for `prefect deploy --all` (a server elsewhere, another pool); a test keeps
the two equal. Registering them in this process takes a second, the command line takes several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infra import watch

WORK_POOL = "local"


@dataclass(frozen=True)
class Deployment:
    """One deployment of one flow. `entrypoint` is a module path, so that any working directory will do."""

    entrypoint: str
    description: str
    name: str = "local"
    parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    tags: tuple[str, ...] = ("sprawl",)


DEPLOYMENTS = (
    Deployment(
        "flows.post_train.post_train",
        "Post-train a model: one run, from its YAML or resumed from its board. Starts islands and anchor here.",
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
    ),
    Deployment(
        "flows.compare.compare",
        "Matched arms of a study, several seeds each: trained, then laid side by side in one table and its figures.",
        parameters=MappingProxyType({"study": "configs/compare/report.yaml"}),
    ),
    Deployment(
        "flows.promote.promote",
        "A person decides whether a version is promoted: shows the facts, waits for the form, writes the answer down.",
        parameters=MappingProxyType({"run_id": "latest"}),
    ),
)


def register(directory: Path) -> list[str]:
    """Create or update the work pool, all deployments and the alerts on the server of the current Prefect settings.

    `directory` is where flow runs start: relative paths of configs and boards mean what they mean there.
    Returns the deployments as `flow/name`.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.utilities.callables import parameter_schema
    from prefect.workers.process import ProcessWorker

    pull_steps = [{"prefect.deployments.steps.set_working_directory": {"directory": str(directory)}}]
    names = []
    with get_client(sync_client=True) as client:
        with contextlib.suppress(ObjectAlreadyExists):
            template = ProcessWorker.get_default_base_job_template()
            client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=template))
        for deployment in DEPLOYMENTS:
            module, _, attribute = deployment.entrypoint.rpartition(".")
            flow = getattr(import_module(module), attribute)
            client.create_deployment(
                flow_id=client.create_flow_from_name(flow.name),
                name=deployment.name,
                description=deployment.description,
                entrypoint=deployment.entrypoint,
                path=str(directory),
                pull_steps=pull_steps,
                work_pool_name=WORK_POOL,
                parameters=dict(deployment.parameters),
                parameter_openapi_schema=parameter_schema(flow.fn).model_dump_for_openapi(),
                enforce_parameter_schema=True,
                tags=list(deployment.tags),
            )
            names.append(f"{flow.name}/{deployment.name}")
        watch.install(client)
    return names
