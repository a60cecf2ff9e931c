"""What SkyPilot says about the shipped YAMLs, without a network: loads each as its command line would, and places it
over mini catalogs. A process of its own, because SkyPilot reads its folders when it is imported.

    SKY_RUNTIME_DIR=DIR HOME=DIR python -m tests.skypilot.offline      prints one JSON object
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

ENVS = [("SPRAWL_BOARD", "s3://bucket/runs"), ("SPRAWL_RUN_ID", "run-1")]
SECRETS = [("SPRAWL_TOKEN", "not-so-secret")]
TASKS = ("trainer", "rollout-worker", "anchor", "serve")
SKY = Path(__file__).parents[2] / "sky"


def main() -> None:
    from sky.skylet import constants

    from infra.skypilot.prices import hourly_price
    from tests.skypilot.catalogs import write_catalogs

    root = Path(os.environ["SKY_RUNTIME_DIR"]) / ".sky" / "catalogs" / constants.CATALOG_SCHEMA_VERSION
    write_catalogs(root)
    with contextlib.redirect_stdout(sys.stderr):
        answer = {
            "schema": {name: _schema(name) for name in TASKS},
            "typos": {name: _refused(name, typo) for name, typo in TYPOS.items()},
            "missing": {name: _missing(name) for name in TASKS},
            "group": _group(),
            "placed": {name: _place(_load(name)) for name in TASKS},
            "dry": _place(_changed("rollout-worker", lambda r: _without(r, "gcp", "runpod"))),
            "price": hourly_price("aws/us-east-1", "g5.xlarge", ("A10G", 1), True),
            "price_unknown": hourly_price("aws/us-east-1", "no-such-type", None, True),
            "capped": _place(_changed("rollout-worker", lambda r: {**r, "max_hourly_cost": 0.28})),
            "too_dear": _place(_changed("rollout-worker", lambda r: {**r, "max_hourly_cost": 0.01})),
            "trainer_on_runpod": _place(_changed("trainer", lambda r: _only(r, "runpod"))),
            "trainer_on_runpod_without_fabric": _place(
                _changed("trainer", lambda r: {k: v for k, v in _only(r, "runpod").items() if k != "network_tier"})
            ),
            "trainer_with_runpod": _place(
                _changed("trainer", lambda r: {**r, "any_of": [*r["any_of"], {"infra": "runpod"}]})
            ),
        }
    json.dump(answer, sys.stdout)


TYPOS = {
    "trainer": ("resources", "network_teir", "best"),
    "rollout-worker": ("resources", "job_recovry", "FAILOVER"),
    "anchor": (None, "secret", {}),
    "serve": ("service", "readiness_prob", "/health"),
}


def _yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load((SKY / f"{name}.yaml").read_text())


def _task(config: dict[str, Any]) -> Any:
    import sky

    return sky.Task.from_yaml_config(config, ENVS, SECRETS)


def _load(name: str) -> Any:
    return _task(_yaml(name))


def _changed(name: str, change: Any) -> Any:
    config = _yaml(name)
    config["resources"] = change(config["resources"])
    return _task(config)


def _only(resources: dict[str, Any], cloud: str) -> dict[str, Any]:
    return {**resources, "any_of": [{"infra": cloud}]}


def _without(resources: dict[str, Any], *clouds: str) -> dict[str, Any]:
    return {**resources, "any_of": [entry for entry in resources["any_of"] if entry["infra"] not in clouds]}


def _schema(name: str) -> dict[str, Any]:
    task = _load(name)
    resources = list(task.resources)
    return {
        "nodes": task.num_nodes,
        "spot": sorted({each.use_spot for each in resources}),
        "recovery": resources[0].job_recovery,
        "tiers": sorted({each.network_tier.value for each in resources if each.network_tier}),
        "ports": resources[0].ports,
        "clouds": sorted({str(each.cloud).lower() for each in resources}),
        "secrets": sorted(task.secrets),
        "in_envs": sorted(set(task.secrets) & set(task.envs)),
        "service": task.service is not None
        and {
            "path": task.service.readiness_path,
            "placer": task.service.spot_placer,
            "fallback": task.service.dynamic_ondemand_fallback,
        },
    }


def _refused(name: str, typo: tuple[str | None, str, Any]) -> str:
    section, key, value = typo
    config = _yaml(name)
    (config[section] if section else config)[key] = value
    try:
        _task(config)
    except Exception as error:
        return str(error)
    return ""


def _missing(name: str) -> str:
    """What is said when what is required is not given."""
    import sky

    try:
        sky.Task.from_yaml_config(_yaml(name))
    except Exception as error:
        return str(error)
    return ""


def _group() -> dict[str, Any]:
    from sky.utils import dag_utils

    dag = dag_utils.load_job_group_from_yaml(str(SKY / "jobgroup.yaml"), ENVS, SECRETS)
    return {
        "name": dag.name,
        "tasks": [task.name for task in dag.tasks],
        "primary": dag.primary_tasks,
        "delay": dag.termination_delay,
        "parallel": dag.is_job_group(),
    }


def _place(task: Any) -> dict[str, Any]:
    """Where the optimizer would put it, or why nowhere."""
    from sky.catalog import aws_catalog

    import sky
    from sky import clouds

    enabled = [clouds.AWS(), clouds.GCP(), clouds.Nebius(), clouds.RunPod()]
    with (
        mock.patch("sky.check.get_cached_enabled_clouds_or_refresh", return_value=enabled),
        mock.patch.object(aws_catalog, "_user_df", aws_catalog._default_df),
        mock.patch("sky.clouds.Cloud.check_quota_available", return_value=True),
        mock.patch("sky.clouds.AWS.check_quota_available", return_value=True),
        mock.patch("sky.clouds.GCP.check_quota_available", return_value=True),
    ):
        dag = sky.Dag()
        dag.add(task)
        try:
            sky.Optimizer.optimize(dag, quiet=True)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    best = task.best_resources
    return {
        "cloud": str(best.cloud).lower(),
        "instance": best.instance_type,
        "spot": best.use_spot,
        "hourly": best.get_cost(3600) * task.num_nodes,
    }


if __name__ == "__main__":
    main()
