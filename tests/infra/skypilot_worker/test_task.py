"""From job variables and a task file to the task that is launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.skypilot_worker.port import InfrastructureError, JobPlace
from infra.skypilot_worker.task import (
    COMMAND,
    build_task,
    is_loopback,
    places,
    read_task_file,
    slug,
    stops_by_itself,
)
from infra.skypilot_worker.variables import SkyFields

FILE = {
    "name": "trainer",
    "num_nodes": 4,
    "resources": {
        "accelerators": "H100:8",
        "network_tier": "best",
        "any_of": [{"infra": "aws", "use_spot": True}, {"infra": "gcp", "use_spot": True}],
    },
    "envs": {"BOARD": None, "SEED": "1"},
    "secrets": {"TOKEN": ""},
    "file_mounts": {"/a": "s3://a"},
    "workdir": ".",
    "setup": "install",
}


def build(fields: dict[str, Any], base: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"name": "job", "command": "prefect flow-run execute", "env": {}, "environ": {}} | more
    return build_task(SkyFields.model_validate(fields), base or {}, **arguments)


def test_without_a_file_the_flow_run_starts_on_node_0_alone() -> None:
    task = build({"accelerators": "L4", "num_nodes": 2})
    assert task["resources"] == {"accelerators": "L4"}
    assert task["num_nodes"] == 2
    assert task["envs"] == {COMMAND: "prefect flow-run execute"}
    assert "SKYPILOT_NODE_RANK" in task["run"]
    assert task["run"].rstrip().endswith(f"exec ${COMMAND}")


def test_variables_go_over_the_file_and_leave_the_rest() -> None:
    task = build(
        {
            "num_nodes": 2,
            "envs": {"BOARD": "s3://b"},
            "file_mounts": {"/b": "s3://b"},
            "config": {"aws": {"use_internal_ips": True}},
        },
        FILE,
    )
    assert task["name"] == "job"
    assert task["num_nodes"] == 2
    assert task["envs"]["BOARD"] == "s3://b"
    assert task["envs"]["SEED"] == "1"
    assert task["file_mounts"] == {"/a": "s3://a", "/b": "s3://b"}
    assert task["config"] == {"aws": {"use_internal_ips": True}}
    assert task["resources"] == FILE["resources"]
    assert (task["workdir"], task["setup"]) == (".", "install")
    assert FILE["name"] == "trainer", "the file's own mapping is not written to"


def test_a_single_field_holds_for_every_choice() -> None:
    assert build({"use_spot": False}, FILE)["resources"] == {
        "accelerators": "H100:8",
        "network_tier": "best",
        "use_spot": False,
        "any_of": [{"infra": "aws"}, {"infra": "gcp"}],
    }


def test_a_place_replaces_all_ways_to_say_one() -> None:
    base = {"resources": {"region": "us-east-1", "any_of": [{"cloud": "aws"}, {"infra": "gcp"}]}}
    assert build({"infra": "nebius"}, base)["resources"] == {"infra": "nebius"}


def test_resources_replace_those_of_the_file_and_choices_each_other() -> None:
    assert build({"resources": {"infra": "slurm/c", "cpus": 2}}, FILE)["resources"] == {"infra": "slurm/c", "cpus": 2}
    ordered = build({"ordered": [{"infra": "gcp"}]}, FILE)["resources"]
    assert ordered["ordered"] == [{"infra": "gcp"}]
    assert "any_of" not in ordered


def test_secrets_come_from_the_worker_and_are_no_plain_environment() -> None:
    task = build(
        {"secrets": {"TOKEN": None, "HF_TOKEN": "x"}},
        FILE,
        env={"PREFECT_API_URL": "https://p", "PREFECT_API_KEY": "k", "TOKEN": "leaked"},
        environ={"TOKEN": "t"},
    )
    assert task["secrets"] == {"TOKEN": "t", "HF_TOKEN": "x", "PREFECT_API_KEY": "k"}
    assert not set(task["envs"]) & set(task["secrets"])
    assert task["envs"]["PREFECT_API_URL"] == "https://p"


def test_a_secret_that_is_nowhere_is_named() -> None:
    with pytest.raises(InfrastructureError, match="secret TOKEN: no value"):
        build({"secrets": {"TOKEN": None}})


def test_settings_of_the_worker_s_own_machine_stay_there() -> None:
    env = {
        "PREFECT_HOME": "/root/.prefect",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": "sqlite:///x",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_LOGGING_LEVEL": "DEBUG",
        "PREFECT__FLOW_RUN_ID": "1",
    }
    envs = build({}, env=env)["envs"]
    assert set(envs) == {"PREFECT_LOGGING_LEVEL", "PREFECT__FLOW_RUN_ID", COMMAND}


def test_a_run_script_has_to_start_the_flow_run() -> None:
    run = f'torchrun --no-python "${COMMAND}"'
    assert build({"run": run})["run"] == run
    assert build({}, {"run": run})["run"] == run
    with pytest.raises(InfrastructureError, match="never starts the flow run"):
        build({}, {"run": "python train.py"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: a\n---\nname: b\n", "not one SkyPilot task"),
        ("- a\n", "not one SkyPilot task"),
        ("service: {readiness_probe: /}\n", "describes a service"),
        ("pool: {workers: 2}\n", "describes a pool"),
        ("run: [", "not valid YAML"),
    ],
)
def test_files_that_are_no_task_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(text)
    with pytest.raises(InfrastructureError, match=words):
        read_task_file(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"no\.yaml: No such file"):
        read_task_file(tmp_path / "no.yaml")


def test_where_a_task_may_be_placed() -> None:
    assert places({}) == []
    assert places({"resources": {"any_of": [{"infra": "aws"}, {"cloud": "gcp"}]}}) == ["aws", "gcp"]
    assert not stops_by_itself({"resources": {"infra": "slurm/cluster"}})
    assert stops_by_itself({"resources": {"infra": "k8s/context"}})


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:4200/api", True),
        ("http://localhost:4200/api", True),
        ("http://[::1]:4200/api", True),
        ("https://api.prefect.cloud/api", False),
        ("http://10.0.0.5:4200/api", False),
        (None, False),
    ],
)
def test_loopback(url: str | None, loopback: bool) -> None:
    assert is_loopback(url) is loopback


def test_names() -> None:
    assert slug("Lively Otter!", 40) == "lively-otter"
    assert slug("2026-01-01", 40) == "run-2026-01-01"
    assert slug("a-" * 50, 9) == "a-a-a-a-a"
    assert slug("", 40) == "run"


def test_infrastructure_ids_are_read_back() -> None:
    place = JobPlace("prefect-1", "post-train-1")
    assert JobPlace.parse(str(place)) == place
    for text in ("", "cluster", "cluster/", "/job", "a/b/c"):
        with pytest.raises(ValueError, match="cluster/job"):
            JobPlace.parse(text)
