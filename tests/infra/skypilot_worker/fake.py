"""SkyPilot as the worker's port sees it, in memory: what would take minutes happens when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.skypilot_worker.port import (
    ClusterLost,
    InfrastructureError,
    Job,
    JobState,
    LaunchAborted,
    LaunchFailed,
    Unreachable,
)

WAIT_S = 30.0


@dataclass
class FakeCluster:
    jobs: list[Job] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)


@dataclass
class FakeSky:
    """`hold`: launches wait for `release`. `no_machines`: why launches fail. `silent`: how many calls about jobs find
    nobody. `refusal`: why tasks are refused. Everything asked of it is in `calls`."""

    hold: bool = False
    no_machines: str | None = None
    silent: int = 0
    refusal: str | None = None
    output: tuple[str, ...] = ()
    calls: list[tuple[str, str]] = field(default_factory=list)
    tasks: list[dict[str, Any]] = field(default_factory=list)
    autostops: list[int | None] = field(default_factory=list)
    clusters: dict[str, FakeCluster] = field(default_factory=dict)
    release: threading.Event = field(default_factory=threading.Event)
    launching: threading.Event = field(default_factory=threading.Event)
    running: threading.Event = field(default_factory=threading.Event)
    _aborted: bool = False

    # -- the port

    def check(self, task: Mapping[str, Any]) -> None:
        if self.refusal:
            raise InfrastructureError(self.refusal)

    def launch(
        self,
        task: Mapping[str, Any],
        cluster: str,
        *,
        autostop_minutes: int | None,
        retry_until_up: bool,
        say: Callable[[str], None],
    ) -> None:
        self.calls.append(("launch", cluster))
        self.tasks.append(dict(task))
        self.autostops.append(autostop_minutes)
        self.clusters.setdefault(cluster, FakeCluster())
        say("looking for machines")
        self.launching.set()
        if self.hold:
            assert self.release.wait(WAIT_S)
        if self._aborted:
            raise LaunchAborted("the launch was called off")
        if self.no_machines:
            raise LaunchFailed(self.no_machines)
        place = self.clusters[cluster]
        place.output.extend(self.output)
        place.jobs.append(Job(len(place.jobs) + 1, task["name"], JobState.RUNNING))
        self.running.set()

    def job(self, cluster: str, name: str) -> Job | None:
        found = [job for job in self._cluster(cluster).jobs if job.name == name]
        return found[-1] if found else None

    def follow(self, cluster: str, number: int, write: Callable[[str], None]) -> None:
        place = self._cluster(cluster)
        for line in place.output:
            write(line)
        with place.changed:
            assert place.changed.wait_for(lambda: not place.jobs or place.jobs[number - 1].state.ended, WAIT_S)

    def cancel(self, cluster: str, number: int) -> None:
        self.calls.append(("cancel", cluster))
        self.end(cluster, JobState.CANCELLED)

    def down(self, cluster: str) -> None:
        self.calls.append(("down", cluster))
        place = self._cluster(cluster)
        del self.clusters[cluster]
        with place.changed:
            place.jobs.clear()
            place.changed.notify_all()
        if self.hold:
            self._aborted = True
            self.release.set()

    # -- what happens

    def end(self, cluster: str, state: JobState) -> None:
        """The newest job of a cluster ends."""
        place = self.clusters[cluster]
        with place.changed:
            place.jobs[-1] = Job(place.jobs[-1].number, place.jobs[-1].name, state)
            place.changed.notify_all()

    def preempt(self, cluster: str) -> None:
        """The machines are taken away."""
        place = self.clusters.pop(cluster)
        with place.changed:
            place.jobs.clear()
            place.changed.notify_all()

    def asked(self, what: str) -> list[str]:
        return [cluster for call, cluster in self.calls if call == what]

    def _cluster(self, cluster: str) -> FakeCluster:
        if self.silent:
            self.silent -= 1
            raise Unreachable("no answer")
        if cluster not in self.clusters:
            raise ClusterLost(f"{cluster} does not exist")
        return self.clusters[cluster]
