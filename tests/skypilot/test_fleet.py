"""The fleet on managed jobs: what is launched, how jobs become machines, and that nothing is kept in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.skypilot.fleet import SkyFleet, given, job_prefix, limited
from infra.skypilot.jobs import Job, NoController
from infra.skypilot.prices import instance_type
from sprawl.board.store import MemoryStore
from sprawl.config import parse_config
from sprawl.errors import SprawlError
from sprawl.fleet.port import Machine
from sprawl.fleet.reap import reap
from sprawl.run.fleet import Exit, FleetContext
from tests.skypilot.fakes import FakeJobs

CONFIG = parse_config({"name": "t", "steps": 1, "policy": {"base": "x"}}, "test")
SECRETS = {"SPRAWL_TOKEN": "t0k3n", "AWS_ACCESS_KEY_ID": "", "UNRELATED": "no"}


def fleet(jobs: FakeJobs, run_id: str = "run-1", **options: object) -> SkyFleet:
    context = FleetContext("s3://b/runs", run_id, CONFIG, Path("logs"), **options)  # type: ignore[arg-type]
    return SkyFleet(context, jobs, SECRETS)


def test_an_island_is_the_shipped_yaml_with_its_name_and_secrets() -> None:
    jobs = FakeJobs()
    fleet(jobs, island_hourly_cost=2.5, job_group="my-run").start_island("island-4")
    (launched,) = jobs.launched.values()
    assert launched["envs"] == {
        "SPRAWL_ISLAND_ID": "island-4",
        "SPRAWL_BOARD": "s3://b/runs",
        "SPRAWL_RUN_ID": "run-1",
    }
    assert launched["secrets"] == {"SPRAWL_TOKEN": "t0k3n"}
    assert launched["group"] == "my-run"
    assert launched["task"]["resources"]["max_hourly_cost"] == 2.5
    assert launched["task"]["resources"]["use_spot"] is True
    assert jobs.jobs[1].name == job_prefix("run-1") + "island-4"


def test_starting_what_is_there_is_a_no_op_and_what_ended_may_come_again() -> None:
    jobs = FakeJobs()
    fleet(jobs).start_island("island-0")
    fleet(jobs).start_island("island-0")  # another process
    assert len(jobs.jobs) == 1
    jobs.become(1, "FAILED")
    fleet(jobs).start_island("island-0")
    assert len(jobs.jobs) == 2


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ("PENDING", "pending"),
        ("STARTING", "starting"),
        ("RUNNING", "running"),
        ("RECOVERING", "recovering"),
        ("CANCELLING", "ending"),
        ("SUCCEEDED", None),
        ("FAILED_NO_RESOURCE", None),
    ],
)
def test_a_job_is_a_machine_until_it_has_ended(status: str, phase: str | None) -> None:
    jobs = FakeJobs()
    fleet(jobs).start_island("island-0")
    jobs.become(1, status, since=5.0, where="aws/us-east-1", hourly=1.25)
    expected = [] if phase is None else [Machine("island-0", phase, 5.0, 1.25, "aws/us-east-1")]  # type: ignore[arg-type]
    assert fleet(jobs).machines() == expected


def test_of_two_jobs_of_one_name_the_younger_is_cancelled() -> None:
    jobs = FakeJobs()
    fleet(jobs).start_island("island-0")
    jobs.launch({}, jobs.jobs[1].name, {}, {}, None)  # the answer to the first launch was lost
    assert [machine.island_id for machine in fleet(jobs).machines()] == ["island-0"]
    assert [job.status for job in jobs.jobs.values()] == ["PENDING", "CANCELLING"]
    fleet(jobs).cancel_island("island-0")
    assert {job.status for job in jobs.jobs.values()} == {"CANCELLING"}


def test_runs_do_not_touch_each_other() -> None:
    jobs = FakeJobs()
    for run_id in ("run-1", "run-1.5", "run-15"):
        fleet(jobs, run_id).start_island("island-0")
    fleet(jobs, "run-1").stop()
    assert [job.status for job in jobs.jobs.values()] == ["CANCELLING", "PENDING", "PENDING"]
    names = {job_prefix(run) for run in ("run-1", "run-1.5", "Run-1", "run_1", "x" * 60)}
    assert len(names) == 5
    assert all(len(name) < 50 and name.replace("-", "").isalnum() for name in names)


def test_lost_jobs_are_told_once_and_not_those_of_an_earlier_life() -> None:
    jobs = FakeJobs()
    old = fleet(jobs)
    old.start_island("island-0")
    jobs.become(1, "FAILED")
    now = fleet(jobs)
    assert now.poll() == []
    now.start_island("island-0")
    now.start_anchor()
    now.start_anchor()
    jobs.become(2, "FAILED_SETUP")
    jobs.become(3, "SUCCEEDED")
    assert now.poll() == [Exit("island-0", 1, Path("sky jobs logs 2"))]
    assert now.poll() == []
    assert len(jobs.jobs) == 3


def test_reap_cancels_every_job_and_waits_for_its_end() -> None:
    jobs, store, clock = FakeJobs(), MemoryStore(), [0.0]
    for number in range(3):
        fleet(jobs).start_island(f"island-{number}")

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 20:
            for job in list(jobs.jobs.values()):
                jobs.become(job.job_id, "CANCELLED")

    ended = reap(store, "run-1", fleet(jobs), now=lambda: clock[0], sleep=sleep)
    assert len(ended.cancelled) == 3
    assert clock[0] > 20 + SkyFleet.settle_s


def test_without_a_jobs_controller_there_is_nothing() -> None:
    class None_(FakeJobs):
        def list(self, prefix: str) -> list[Job]:
            raise NoController("no controller")

    assert fleet(None_()).machines() == []


def test_a_yaml_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SprawlError, match=r"cannot read sky/rollout-worker.yaml.*SPRAWL_SKY_ISLAND"):
        fleet(FakeJobs()).start_island("island-0")


def test_small_parts() -> None:
    assert given({"A": None, "B": ""}, {"A": "1", "B": "", "C": "3"}) == {"A": "1"}
    task = {"resources": {"use_spot": True}}
    assert limited(task, 2.0) == {"resources": {"use_spot": True, "max_hourly_cost": 2.0}}
    assert limited(task, None) == task
    assert instance_type("1x[spot](gpus=L4:1, cpus=4, mem=16, g2-standard-4, disk=256, ports=['8300'])") == (
        "g2-standard-4"
    )
    assert instance_type("2x(cpus=8, mem=32, ...)") is None
    assert instance_type("Initializing") is None
