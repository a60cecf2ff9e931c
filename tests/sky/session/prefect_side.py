"""The worker as a process, and flow runs on its pool, through Prefect's own commands and client."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL
from prefect.utilities.callables import parameter_schema

from infra.processes import ProcessId, end_tree, spawn

POOL = "slurm"


def api_url() -> str:
    url = PREFECT_API_URL.value()
    assert url is not None, "no Prefect server is up"
    return url


def create_pool(env: Mapping[str, str], cwd: Path) -> None:
    """`prefect work-pool create --type skypilot`: also shows that the type is found by its entry point."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "work-pool", "create", POOL, "--type", "skypilot"]
    done = subprocess.run(command, env=dict(env), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def worker(env: Mapping[str, str], cwd: Path, log: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--name", "slurm"]
    process = spawn([*command, "--install-policy", "never"], log=log, env=env, cwd=cwd)
    identity = ProcessId.of(process.pid)
    try:
        yield
    finally:
        end_tree([identity] if identity else [], grace_s=15.0)
        process.wait()


def deploy(flow: Any, entrypoint: str, job_variables: dict[str, Any]) -> UUID:
    with get_client(sync_client=True) as client:
        return client.create_deployment(
            flow_id=client.create_flow_from_name(flow.name),
            name=POOL,
            entrypoint=entrypoint,
            # Where SkyPilot has put the checkout: the directory that the job starts in.
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": "."}}],
            work_pool_name=POOL,
            job_variables=job_variables,
            parameter_openapi_schema=parameter_schema(flow.fn).model_dump_for_openapi(),
        )


def start(deployment: UUID, parameters: dict[str, Any]) -> UUID:
    with get_client(sync_client=True) as client:
        return client.create_flow_run_from_deployment(deployment, parameters=parameters).id


def read(flow_run: UUID) -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run)


def wait_final(flow_run: UUID, timeout_s: float) -> FlowRun:
    deadline = time.monotonic() + timeout_s
    while True:
        found = read(flow_run)
        if found.state is not None and found.state.is_final():
            return found
        assert time.monotonic() < deadline, f"flow run is still {found.state}"
        time.sleep(2.0)
