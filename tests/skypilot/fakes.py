"""Managed jobs as SkyPilot keeps them, without SkyPilot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infra.skypilot.jobs import Job


@dataclass
class FakeJobs:
    """`launched`: what each job was launched with, by id."""

    jobs: dict[int, Job] = field(default_factory=dict)
    launched: dict[int, dict[str, Any]] = field(default_factory=dict)

    def launch(
        self, task: Mapping[str, Any], name: str, envs: Mapping[str, str], secrets: Mapping[str, str], group: str | None
    ) -> None:
        job_id = len(self.jobs) + 1
        self.jobs[job_id] = Job(job_id, name, "PENDING", 1000.0)
        self.launched[job_id] = {"task": task, "envs": dict(envs), "secrets": dict(secrets), "group": group}

    def list(self, prefix: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.name.startswith(prefix)]

    def cancel(self, job_ids: Sequence[int]) -> None:
        for job_id in job_ids:
            self.become(job_id, "CANCELLING")

    def become(self, job_id: int, status: str, **changes: Any) -> None:
        self.jobs[job_id] = replace(self.jobs[job_id], status=status, **changes)
