"""The few things that the worker asks of SkyPilot. `sdk.SkySdk` asks the real one; tests put a fake in its place."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class InfrastructureError(Exception):
    """What the reader can fix: job variables that make no task, or a task that SkyPilot refuses."""


class LaunchFailed(InfrastructureError):
    """No machines, or setting them up failed; says why."""


class LaunchAborted(InfrastructureError):
    """The launch was called off, by bringing its cluster down."""


class ClusterLost(Exception):
    """The cluster is gone: preempted, brought down, or its head answers no more."""


class Unreachable(Exception):
    """Nothing is known at the moment (the API server does not answer): ask again later."""


class JobState(enum.Enum):
    """Where a job is. The values are SkyPilot's own."""

    INIT = "INIT"
    PENDING = "PENDING"
    SETTING_UP = "SETTING_UP"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    FAILED_SETUP = "FAILED_SETUP"
    FAILED_DRIVER = "FAILED_DRIVER"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        return self not in (JobState.INIT, JobState.PENDING, JobState.SETTING_UP, JobState.RUNNING)


@dataclass(frozen=True)
class Job:
    number: int  # counts from 1 on each cluster
    name: str
    state: JobState


@dataclass(frozen=True)
class JobPlace:
    """The infrastructure id of a flow run, `cluster/job`. Known before anything is launched, so that a flow run can be
    cancelled while SkyPilot still looks for machines."""

    cluster: str
    job: str

    def __str__(self) -> str:
        return f"{self.cluster}/{self.job}"

    @classmethod
    def parse(cls, text: str) -> JobPlace:
        """Raises ValueError for anything that is not `cluster/job`."""
        cluster, separator, job = text.partition("/")
        if not (cluster and separator and job) or "/" in job:
            raise ValueError(f"{text!r} is not of the form cluster/job")
        return cls(cluster, job)


class SkyPilot(Protocol):
    """All calls block; `say` and `write` are called with whole lines from the calling thread."""

    def check(self, task: Mapping[str, Any]) -> None:
        """Raises InfrastructureError when SkyPilot does not accept the task. Launches nothing."""

    def launch(
        self,
        task: Mapping[str, Any],
        cluster: str,
        *,
        autostop_minutes: int | None,
        retry_until_up: bool,
        say: Callable[[str], None],
    ) -> None:
        """Bring the cluster up where it is not, set it up and submit the job, named as the task is.

        Raises LaunchFailed, LaunchAborted.
        """

    def job(self, cluster: str, name: str) -> Job | None:
        """The newest job of that name; None when there is none yet. Raises ClusterLost, Unreachable."""

    def follow(self, cluster: str, number: int, write: Callable[[str], None]) -> None:
        """The job's output from its beginning, until it ends or the connection does."""

    def cancel(self, cluster: str, number: int) -> None:
        """Ask the job to end. Raises ClusterLost, Unreachable."""

    def down(self, cluster: str) -> None:
        """End the cluster, and a launch of it that is under way. Raises ClusterLost when there is none, Unreachable."""
