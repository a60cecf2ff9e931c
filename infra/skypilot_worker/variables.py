"""What a work pool of type `skypilot` lets a deployment decide, and what the worker makes of it for one flow run."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal

from prefect.workers.base import BaseJobConfiguration, BaseVariables
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ACCELERATOR = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(:\d+(\.\d+)?)?")
CLUSTER = re.compile(r"[A-Za-z]([A-Za-z0-9._-]{0,50}[A-Za-z0-9])?")
CHOICE_KEYS = (
    "accelerators", "accelerator_args", "autostop", "cloud", "cpus", "disk_size", "disk_tier", "image_id", "infra",
    "instance_type", "job_recovery", "labels", "local_disk", "max_hourly_cost", "memory", "network_tier", "ports",
    "priority", "region", "use_spot", "volumes", "zone",
)  # fmt: skip
"""What one entry of `any_of` or `ordered` may say. SkyPilot checks the values."""

Accelerators = str | dict[str, float] | list[str]


class SkyFields(BaseModel):
    """The job variables of SkyPilot tasks. None or empty: as the task file says, else as SkyPilot chooses."""

    task: str | None = Field(
        None, description="SkyPilot YAML to begin with, a path on the worker's machine. What is set here goes over it."
    )
    resources: dict[str, Any] | None = Field(
        None, description="Replaces the whole `resources` of the task file. The fields below still go over it."
    )
    accelerators: Accelerators | None = Field(None, description="H100:8, {H100: 8}, or a list to choose from.")
    infra: str | None = Field(None, description="aws, gcp/us-central1, k8s/context, slurm/cluster/partition ...")
    instance_type: str | None = Field(None, description="A cloud's name of a machine type.")
    cpus: str | int | None = Field(None, description="vCPUs a node: 4, or 4+ for at least four.")
    memory: str | float | None = Field(None, description="GB a node: 16, or 16+.")
    disk_size: Annotated[int, Field(gt=0)] | None = Field(None, description="GB of disk a node.")
    image_id: str | None = Field(None, description="Machine or docker image, for example docker:IMAGE.")
    num_nodes: Annotated[int, Field(ge=1)] | None = Field(None, description="Machines of the cluster.")
    use_spot: bool | None = Field(None, description="Preemptible machines. A lost one crashes the flow run.")
    network_tier: Literal["standard", "best"] | None = Field(None, description="best: RDMA where the cloud has it.")
    max_hourly_cost: Annotated[float, Field(gt=0)] | None = Field(None, description="Dollars an hour a node, at most.")
    any_of: list[dict[str, Any]] | None = Field(None, description="Sets of resources; the cheapest available is used.")
    ordered: list[dict[str, Any]] | None = Field(None, description="Sets of resources, tried in this order.")
    envs: dict[str, str] = Field(default_factory=dict, description="Environment of setup and run, over `env`.")
    secrets: dict[str, str | None] = Field(
        default_factory=dict,
        description="Environment that SkyPilot never shows. null: the worker's own variable of that name.",
    )
    file_mounts: dict[str, Any] = Field(default_factory=dict, description="Path on the nodes -> source, or storage.")
    volumes: dict[str, Any] = Field(default_factory=dict, description="Path on the nodes -> SkyPilot volume.")
    workdir: str | dict[str, Any] | None = Field(
        None, description="Directory of the worker's machine, or {url, ref} of a git repository, to run in."
    )
    setup: str | None = Field(None, description="Shell script, before the flow run, on every node.")
    run: str | None = Field(
        None,
        description="Shell script of every node; $PREFECT_FLOW_RUN_COMMAND has to run on one. Default: node 0 runs it.",
    )
    config: dict[str, Any] = Field(default_factory=dict, description="SkyPilot settings for this task alone.")
    cluster: str | None = Field(
        None, description="A cluster to share, made if it is not there and left up. Default: one per flow run."
    )
    autostop_minutes: Annotated[int, Field(ge=1)] | None = Field(
        30, description="A cluster that nobody brought down ends itself after so many idle minutes. null: never."
    )
    retry_until_up: bool = Field(False, description="Ask again and again until machines can be had.")
    poll_s: Annotated[float, Field(gt=0)] = Field(10.0, description="Seconds between two looks at the job.")
    stream_output: bool = Field(
        True, description="Show the job's output in the worker's terminal, and in the flow run's log until it starts."
    )

    @field_validator("accelerators")
    @classmethod
    def _accelerators(cls, value: Accelerators | None) -> Accelerators | None:
        if value is None:
            return None
        names = [value] if isinstance(value, str) else list(value)
        for name in names:
            if not ACCELERATOR.fullmatch(name):
                raise ValueError(f"{name!r} is no accelerator; write NAME or NAME:COUNT, for example H100:8")
        if not names or (isinstance(value, dict) and any(count <= 0 for count in value.values())):
            raise ValueError("name at least one accelerator, with a count above 0")
        return value

    @field_validator("infra")
    @classmethod
    def _infra(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip("/ ") or re.search(r"\s|//", value)):
            raise ValueError(f"{value!r} names no infrastructure; write cloud, cloud/region or cloud/region/zone")
        return value

    @field_validator("any_of", "ordered")
    @classmethod
    def _choices(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for number, choice in enumerate(value or []):
            for key in choice:
                if key not in CHOICE_KEYS:
                    raise ValueError(f"entry {number}: unknown key {key!r}{suggestion(key, CHOICE_KEYS)}")
        if value is not None and not value:
            raise ValueError("give at least one set of resources")
        return value

    @field_validator("envs", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """YAML and the UI give numbers; an environment holds text."""
        if isinstance(value, dict):
            return {key: str(item) if isinstance(item, int | float) else item for key, item in value.items()}
        return value

    @field_validator("envs", "secrets")
    @classmethod
    def _variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of an environment variable")
        return value

    @field_validator("cluster")
    @classmethod
    def _cluster(cls, value: str | None) -> str | None:
        if value is not None and not CLUSTER.fullmatch(value):
            raise ValueError(f"{value!r} is no cluster name: a letter, then letters, digits, '-', '_' or '.'")
        return value

    @model_validator(mode="after")
    def _together(self) -> SkyFields:
        if self.any_of is not None and self.ordered is not None:
            raise ValueError("any_of and ordered exclude each other")
        both = sorted(set(self.envs) & set(self.secrets))
        if both:
            raise ValueError(f"{', '.join(both)}: in envs and in secrets; keep it in one")
        return self


class SkyVariables(SkyFields, BaseVariables):
    """The schema that the UI shows and the server checks."""


class SkyJobConfiguration(SkyFields, BaseJobConfiguration):
    """The job variables of one flow run, checked."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    async def from_template_and_values(cls, base_job_template: dict[str, Any], values: dict[str, Any], client=None):
        """Also refuses variables that the pool does not have: Prefect itself would pass over them in silence."""
        known = base_job_template["variables"].get("properties", {})
        for name in values:
            if name.split(".")[0] not in known:
                raise ValueError(f"the work pool has no job variable {name!r}{suggestion(name, known)}")
        return await super().from_template_and_values(base_job_template, values, client=client)


def suggestion(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
