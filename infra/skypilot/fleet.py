"""The fleet on SkyPilot: one managed job an island. Registered as fleet `sky`.

SkyPilot chooses where (price and availability, by the `any_of` of sky/rollout-worker.yaml) and recovers what is
preempted; the fleet only says how many. Nothing is kept here: jobs are found again by their names, which begin with
the run's, so any process with the same API server can go on, or reap.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from infra.skypilot.jobs import Job, Jobs, NoController, SkyJobs
from sprawl.errors import SprawlError
from sprawl.fleet.port import Machine, Phase
from sprawl.run.fleet import Exit, FleetContext

ISLAND_YAML = Path("sky/rollout-worker.yaml")
ANCHOR_YAML = Path("sky/anchor.yaml")
ANCHOR = "anchor"

_PHASES: dict[str, Phase] = {
    "PENDING": "pending",
    "SUBMITTED": "pending",
    "STARTING": "starting",
    "RUNNING": "running",
    "RECOVERING": "recovering",
    "CANCELLING": "ending",
    "WINDING_DOWN": "ending",
}


class SkyFleet:
    """`environment` gives the values of the YAMLs' `envs` and `secrets` where it has them; SPRAWL_SKY_ISLAND and
    SPRAWL_SKY_ANCHOR name other YAMLs."""

    start_s = 3600.0
    settle_s = 120.0

    def __init__(
        self, context: FleetContext, jobs: Jobs | None = None, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._context = context
        self._jobs = jobs or SkyJobs()
        self._environment = environment
        self._prefix = job_prefix(context.run_id)
        self._reported: set[int] | None = None  # jobs whose end `poll` has told of

    # --- islands ---

    def start_island(self, island_id: str) -> None:
        """Submit the island's job unless one of its name is there."""
        if any(job.name == self._name(island_id) and not job.ended for job in self._list()):
            return
        self._launch(ISLAND_YAML, "SPRAWL_SKY_ISLAND", island_id, {"SPRAWL_ISLAND_ID": island_id})

    def drain_island(self, island_id: str) -> None:
        """Nothing: the island reads on the fleet's log that it is to drain, and its job ends when it has. That works
        where neither SkyPilot nor we can send it a signal; one that does not hear is cancelled after a while."""

    def cancel_island(self, island_id: str) -> None:
        """Cancel every job of this name: there are two when a launch was retried after its answer was lost."""
        self._cancel([job for job in self._list() if job.name == self._name(island_id)])

    def machines(self) -> list[Machine]:
        """Jobs that have not ended. Of two with one name the older counts and the other one is cancelled."""
        found: dict[str, Machine] = {}
        surplus = []
        for job in self._list():
            island_id = job.name.removeprefix(self._prefix)
            if job.ended or island_id == ANCHOR:
                continue
            if island_id in found:
                surplus.append(job)
                continue
            found[island_id] = Machine(island_id, _PHASES.get(job.status, "starting"), job.since, job.hourly, job.where)
        self._cancel(surplus)
        return list(found.values())

    # --- the rest of the port ---

    def start_anchor(self) -> None:
        """Submit the anchor's job unless it is there."""
        if any(job.name == self._name(ANCHOR) and not job.ended for job in self._list()):
            return
        self._launch(ANCHOR_YAML, "SPRAWL_SKY_ANCHOR", ANCHOR, {})

    def poll(self) -> list[Exit]:
        """Jobs that failed since the last call; what SkyPilot recovers, was cancelled or is done is not lost."""
        ended = [job for job in self._list() if job.ended]
        if self._reported is None:
            self._reported = {job.job_id for job in ended}  # of an earlier life of this run
        lost = [job for job in ended if job.job_id not in self._reported and job.status.startswith("FAILED")]
        self._reported |= {job.job_id for job in ended}
        return [Exit(job.name.removeprefix(self._prefix), 1, Path(f"sky jobs logs {job.job_id}")) for job in lost]

    def stop(self) -> None:
        """Cancel every job of this run."""
        self._cancel(self._list())

    # --- jobs ---

    def _name(self, what: str) -> str:
        return f"{self._prefix}{what}"

    def _list(self) -> list[Job]:
        try:
            return self._jobs.list(self._prefix)
        except NoController:
            return []

    def _cancel(self, jobs: list[Job]) -> None:
        if ids := [job.job_id for job in jobs if not job.ended and job.status != "CANCELLING"]:
            self._jobs.cancel(ids)

    def _launch(self, shipped: Path, variable: str, name: str, envs: dict[str, str]) -> None:
        context = self._context
        path = Path(self._environment.get(variable) or shipped)
        try:
            task = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise SprawlError(
                f"cannot read {path}: {' '.join(str(error).split())}",
                f"run it from the root of a checkout, or name the YAML with {variable}",
            ) from None
        envs = {
            **given(task.get("envs"), self._environment),
            **envs,
            "SPRAWL_BOARD": context.board,
            "SPRAWL_RUN_ID": context.run_id,
        }
        secrets = given(task.get("secrets"), self._environment)
        self._jobs.launch(limited(task, context.island_hourly_cost), self._name(name), envs, secrets, context.job_group)


def job_prefix(run_id: str) -> str:
    """What the names of a run's jobs begin with: letters, digits and hyphens, as clouds want them, and different for
    different runs, also where one's id begins with another's."""
    plain = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:30]
    return f"sprawl-{plain}-{hashlib.blake2s(run_id.encode(), digest_size=3).hexdigest()}-"


def given(wanted: Mapping[str, Any] | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Values for a YAML's variables from the environment, where it has them."""
    return {name: environment[name] for name in wanted or {} if environment.get(name)}


def limited(task: Mapping[str, Any], hourly_cost: float | None) -> dict[str, Any]:
    """A task whose machine may cost so much an hour at most, on every cloud of its `any_of`."""
    changed = copy.deepcopy(dict(task))
    if hourly_cost is not None:
        changed.setdefault("resources", {})["max_hourly_cost"] = hourly_cost
    return changed
