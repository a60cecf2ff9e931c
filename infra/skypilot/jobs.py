"""Managed jobs, as few of SkyPilot's calls as the fleet needs. `SkyJobs` is SkyPilot itself; tests have a fake."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sprawl.errors import SprawlError

_FIELDS = ["job_id", "job_name", "status", "submitted_at", "last_recovered_at", "cloud", "region"]
ENDED = frozenset(
    {
        "SUCCEEDED",
        "CANCELLED",
        "FAILED",
        "FAILED_SETUP",
        "FAILED_PRECHECKS",
        "FAILED_NO_RESOURCE",
        "FAILED_CONTROLLER",
    }
)


@dataclass(frozen=True)
class Job:
    """A managed job. `status` is SkyPilot's name of it; `since`: Unix seconds at which it was submitted, or came to run
    (again); `where`: cloud and region once there is a machine."""

    job_id: int
    name: str
    status: str
    since: float | None
    where: str = ""

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class Jobs(Protocol):
    """Every call may raise SprawlError: no API server, no such cloud, a YAML that is refused."""

    def launch(
        self, task: Mapping[str, Any], name: str, envs: Mapping[str, str], secrets: Mapping[str, str], group: str | None
    ) -> None:
        """Submit a job; returns when SkyPilot has it. `task` is a task's YAML, `group` a job to attach it to."""

    def list(self, prefix: str) -> list[Job]:
        """All jobs whose names begin with `prefix`, ended ones included, in the order of their ids."""

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Cancel jobs; ended ones are left alone. Returns when SkyPilot has the wish."""


class SkyJobs:
    """SkyPilot's client, talking to the API server of its own settings."""

    def launch(
        self, task: Mapping[str, Any], name: str, envs: Mapping[str, str], secrets: Mapping[str, str], group: str | None
    ) -> None:
        sky, jobs = _sky()
        with _refusals(f"job {name} cannot be launched"):
            loaded = sky.Task.from_yaml_config(dict(task), list(envs.items()), list(secrets.items()))
            options: dict[str, Any] = {"name": name}
            if group is not None:
                options["job_group"] = group
            with contextlib.redirect_stdout(io.StringIO()):
                sky.get(jobs.launch(loaded, **options))

    def list(self, prefix: str) -> list[Job]:
        sky, jobs = _sky()
        with _refusals("the queue of managed jobs cannot be read"):
            # Not `refresh`: it would start a jobs controller, which costs money, only to find that nothing runs.
            # Of all users: who reaps need not be who launched.
            request = jobs.queue_v2(refresh=False, all_users=True, name_match=prefix, fields=_FIELDS)
            records = sky.get(request)[0]
        found: dict[int, Job] = {}
        for record in records:
            if record.job_id is None or not (record.job_name or "").startswith(prefix):
                continue
            status = getattr(record.status, "value", str(record.status))
            since = record.last_recovered_at if status == "RUNNING" and (record.last_recovered_at or 0) > 0 else None
            where = "/".join(part for part in (record.cloud, record.region) if part)
            found[record.job_id] = Job(record.job_id, record.job_name, status, since or record.submitted_at, where)
        return [found[job_id] for job_id in sorted(found)]

    def cancel(self, job_ids: Sequence[int]) -> None:
        sky, jobs = _sky()
        with _refusals(f"jobs {', '.join(map(str, job_ids))} cannot be cancelled"):
            sky.get(jobs.cancel(job_ids=list(job_ids)))


def _sky() -> tuple[Any, Any]:
    """SkyPilot's packages. Imported late: it takes seconds. Raises SprawlError when it is not installed."""
    try:
        import sky
        from sky import jobs
    except ImportError:  # `sky` alone may be the folder of YAMLs in a checkout
        raise SprawlError("SkyPilot is not installed", "pip install 'sprawl-rl[sky]'") from None
    return sky, jobs


@contextlib.contextmanager
def _refusals(what: str):
    """SkyPilot raises many kinds of errors, some of them RuntimeErrors of a page; one line is enough."""
    try:
        yield
    except SprawlError:
        raise
    except Exception as error:
        if type(error).__name__ == "ClusterNotUpError":  # there is no jobs controller: nothing was ever launched
            raise NoController(what) from None
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SprawlError(f"{what}: {line}", "see `sky api status`, `sky check`") from None


class NoController(SprawlError):
    """Managed jobs have no controller yet."""
