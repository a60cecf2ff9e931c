"""Job variables: what is refused, and with which words."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from infra.skypilot_worker import SkyJobConfiguration, SkyWorker

TEMPLATE = SkyWorker.get_default_base_job_template()


def configure(values: dict[str, Any]) -> SkyJobConfiguration:
    """As Prefect does it: the pool's template filled with a deployment's values."""
    return asyncio.run(SkyJobConfiguration.from_template_and_values(TEMPLATE, values, client=object()))


def test_values_arrive_as_they_were_given() -> None:
    values = {
        "accelerators": {"H100": 8},
        "infra": "aws/us-east-1",
        "num_nodes": 2,
        "use_spot": True,
        "network_tier": "best",
        "any_of": [{"infra": "gcp"}, {"infra": "aws", "instance_type": "p5.48xlarge"}],
        "envs": {"A": 1, "B": "two"},
        "secrets": {"KEY": None},
        "file_mounts": {"/data": {"source": "s3://bucket", "mode": "MOUNT"}},
        "setup": "pip install .",
        "env.SEED": "7",
    }
    configuration = configure(values)
    for name in set(values) - {"envs", "env.SEED"}:
        assert getattr(configuration, name) == values[name]
    assert configuration.envs == {"A": "1", "B": "two"}
    assert configuration.env == {"SEED": "7"}


def test_nothing_is_required() -> None:
    configuration = configure({})
    assert (configuration.task, configuration.cluster, configuration.accelerators) == (None, None, None)
    assert configuration.autostop_minutes == 30


def test_every_variable_is_in_the_pool_template_and_explained() -> None:
    properties = TEMPLATE["variables"]["properties"]
    assert set(properties) == set(TEMPLATE["job_configuration"])
    assert all(entry.get("description") for entry in properties.values())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_nods": 2}, "no job variable 'num_nods', did you mean 'num_nodes'"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"accelerators": "H100:eight"}, "write NAME or NAME:COUNT"),
        ({"accelerators": {}}, "at least one accelerator"),
        ({"accelerators": {"H100": 0}}, "above 0"),
        ({"infra": "aws //"}, "cloud/region"),
        ({"network_tier": "rdma"}, "network_tier"),
        ({"any_of": []}, "at least one set"),
        ({"any_of": [{"infra": "aws"}, {"acelerators": "H100"}]}, "entry 1: unknown key 'acelerators', did you mean"),
        ({"any_of": [{"infra": "aws"}], "ordered": [{"infra": "gcp"}]}, "exclude each other"),
        ({"envs": {"not a name": "x"}}, "no name of an environment variable"),
        ({"envs": {"KEY": "x"}, "secrets": {"KEY": "y"}}, "in envs and in secrets"),
        ({"cluster": "9lives"}, "no cluster name"),
        ({"max_hourly_cost": 0}, "max_hourly_cost"),
        ({"autostop_minutes": 0}, "autostop_minutes"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        configure(values)
    assert words in str(error.value)
