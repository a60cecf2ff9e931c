"""From job variables to a SkyPilot task: mappings in, mappings out, no I/O but reading the task file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from .port import InfrastructureError
from .variables import SkyFields

COMMAND = "PREFECT_FLOW_RUN_COMMAND"
"""Environment variable with the flow run's command, for `run` scripts that decide themselves where it runs."""
HEAD_ONLY = f"""\
if [ "${{SKYPILOT_NODE_RANK:-0}}" != 0 ]; then
  echo "node $SKYPILOT_NODE_RANK: the flow runs on node 0"
  exit 0
fi
exec ${COMMAND}
"""
RESOURCE_FIELDS = (
    "accelerators", "infra", "instance_type", "cpus", "memory", "disk_size", "image_id", "use_spot", "network_tier",
    "max_hourly_cost",
)  # fmt: skip
PLACES = ("infra", "cloud", "region", "zone")  # ways to say where, in a task file
SECRET_SETTINGS = ("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_CLIENT_CUSTOM_HEADERS")
LOCAL_SETTINGS = ("PREFECT_HOME", "PREFECT_PROFILES_PATH", "PREFECT_LOCAL_STORAGE_PATH", "PREFECT_MEMO_STORE_PATH",
                  "PREFECT_LOGGING_SETTINGS_PATH", "PREFECT_LOGGING_CONFIG_PATH")  # fmt: skip
LOCAL_PREFIXES = ("PREFECT_SERVER_", "PREFECT_UI_", "PREFECT_WORKER_", "PREFECT_TESTING_")
"""Settings of the worker's own machine: another machine has no such directories and runs no server."""


def read_task_file(path: Path) -> dict[str, Any]:
    """The mapping of a task YAML. Raises InfrastructureError: missing, no YAML, or not a single task."""
    try:
        documents = [item for item in yaml.safe_load_all(path.read_text()) if item is not None]
    except OSError as error:
        raise InfrastructureError(f"cannot read the task file {path}: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        raise InfrastructureError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise InfrastructureError(f"{path} is not one SkyPilot task: a flow run runs one")
    for key in ("service", "pool"):
        if key in documents[0]:
            raise InfrastructureError(f"{path} describes a {key}, and a flow run is a task: remove `{key}`")
    return documents[0]


def build_task(
    fields: SkyFields,
    base: Mapping[str, Any],
    *,
    name: str,
    command: str,
    env: Mapping[str, str],
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """The task of one flow run, as `sky.Task.from_yaml_config` takes it.

    `base`: the task file, or nothing. `env`: what Prefect wants in the environment. `environ`: the worker's own
    environment, where secrets without a value come from. Raises InfrastructureError: a secret that is not there, a
    `run` that never starts the flow run.
    """
    task = dict(base)
    task["name"] = name
    if fields.num_nodes is not None:
        task["num_nodes"] = fields.num_nodes
    resources = build_resources(fields, base.get("resources") or {})
    if resources:
        task["resources"] = resources
    sent = {key: value for key, value in env.items() if not is_local(key)}
    secrets = {key: sent.pop(key) for key in SECRET_SETTINGS if key in sent}
    secrets = _secrets_of(base) | secrets | _values(fields.secrets, environ)
    envs = dict(base.get("envs") or {}) | sent | fields.envs | {COMMAND: command}
    task["envs"] = {key: value for key, value in envs.items() if key not in secrets}
    if secrets:
        task["secrets"] = secrets
    for key, added in (("file_mounts", fields.file_mounts), ("volumes", fields.volumes), ("config", fields.config)):
        if added:
            task[key] = dict(base.get(key) or {}) | added
    for key, value in (("workdir", fields.workdir), ("setup", fields.setup), ("run", fields.run)):
        if value is not None:
            task[key] = value
    task["run"] = _checked_run(task.get("run"))
    return task


def build_resources(fields: SkyFields, base: Mapping[str, Any]) -> dict[str, Any]:
    """`resources` of the task: the file's, or those that replace them, with every single field set over all choices."""
    resources = dict(base if fields.resources is None else fields.resources)
    single = {key: value for key in RESOURCE_FIELDS if (value := getattr(fields, key)) is not None}
    for key in ("any_of", "ordered"):
        chosen = getattr(fields, key)
        if chosen is not None:
            resources.pop("any_of", None)
            resources.pop("ordered", None)
            resources[key] = chosen
        elif key in resources:
            choices = [_without(choice, single) for choice in resources[key]]
            if any(choices):
                resources[key] = choices
            else:
                del resources[key]  # nothing is left to choose between
    return _without(resources, single) | single


def _without(resources: Mapping[str, Any], single: Mapping[str, Any]) -> dict[str, Any]:
    """What a single field says again is dropped; a place can be said in several ways."""
    gone = set(single) | (set(PLACES) if "infra" in single else set())
    return {key: value for key, value in resources.items() if key not in gone}


def _secrets_of(base: Mapping[str, Any]) -> dict[str, Any]:
    secrets = base.get("secrets") or {}
    if not isinstance(secrets, Mapping):
        raise InfrastructureError("secrets of the task file: write NAME: value, or NAME: with nothing")
    return dict(secrets)


def _values(secrets: Mapping[str, str | None], environ: Mapping[str, str]) -> dict[str, str]:
    missing = sorted(name for name, value in secrets.items() if value is None and name not in environ)
    if missing:
        raise InfrastructureError(f"secret {', '.join(missing)}: no value, and not in the worker's environment")
    return {name: environ[name] if value is None else value for name, value in secrets.items()}


def _checked_run(run: str | None) -> str:
    if run is None or not run.strip():
        return HEAD_ONLY
    if COMMAND not in run:
        raise InfrastructureError(f"`run` never starts the flow run: call ${COMMAND} on one of the nodes")
    return run


def is_local(setting: str) -> bool:
    """Whether an environment variable makes sense on the worker's own machine only."""
    return setting in LOCAL_SETTINGS or setting.startswith(LOCAL_PREFIXES)


def places(task: Mapping[str, Any]) -> list[str]:
    """Every infrastructure that the task may be placed on; empty when SkyPilot may choose any."""
    resources = task.get("resources") or {}
    sets = [resources, *(resources.get("any_of") or []), *(resources.get("ordered") or [])]
    return [str(place) for item in sets if (place := item.get("infra") or item.get("cloud"))]


def stops_by_itself(task: Mapping[str, Any]) -> bool:
    """Whether an idle cluster can end itself there. On Slurm an allocation ends with its time limit only."""
    return not any(place.split("/")[0].lower() == "slurm" for place in places(task))


def is_loopback(url: str | None) -> bool:
    """Whether only this machine reaches the URL."""
    host = (urlsplit(url or "").hostname or "").lower()
    return host == "localhost" or host == "::1" or host.startswith("127.")


def slug(text: str, length: int) -> str:
    """Letters, digits and single dashes, beginning with a letter; for names of clusters and jobs."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (words if words[:1].isalpha() else f"run-{words}".rstrip("-"))[:length].rstrip("-")
