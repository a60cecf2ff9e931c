"""The fleet flow: a look is a task, the end of the run reaps and rests, and the deployment looks by clock and event."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule

from flows import fleet as module
from flows.fleet import EVENTS, deploy, fleet
from infra.local_fleet import LocalFleet
from sprawl.board.ledger import Ledger
from sprawl.board.store import open_store
from sprawl.fleet.controller import Controller
from sprawl.fleet.reap import reap
from sprawl.fleet.settings import FleetSettings
from tests.fleet.support import RUN, STEPS, World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(module, "_open", lambda *arguments: (made.store, RUN, made.cloud))

    def now() -> float:
        return made.cloud.now

    monkeypatch.setattr("sprawl.fleet.controller.Controller", partial(Controller, now=now))
    monkeypatch.setattr("sprawl.fleet.reap.reap", partial(reap, now=now, sleep=made.cloud.advance))
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_flow_run_is_one_look_and_the_last_one_reaps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rested: list[bool] = []
    monkeypatch.setattr(module, "_rest", lambda: rested.append(True))
    first = fleet(RUN, settings=world.settings)
    assert (first["target"], first["ended"], rested) == (2, False, [])
    world.settle(20)
    world.steps = STEPS - 1
    world.step(wait_s=0, rollout_s=1)
    world.event("finish", STEPS)
    for _ in range(4):
        world.cloud.advance(20)
        last = fleet(RUN, settings=world.settings)
    assert last["ended"]
    assert rested
    assert world.cloud.there == {}


def test_local_machines_outlive_the_flow_run_that_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = Ledger(open_store("runs", create=True), RUN)
    ledger.create_run(World().ledger.run())
    _, name, adapter = module._open("latest", None, "local", FleetSettings(), None)
    assert name == RUN
    assert isinstance(adapter, LocalFleet)
    assert adapter._context.lasting
    assert adapter._context.board == str(tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_the_end_of_a_run_switches_off_the_schedules_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = DeploymentScheduleCreate(schedule=CronSchedule(cron="* * * * *"), active=True, slug="minutely")
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow_from_name("fleet-rests")
        made = client.create_deployment(flow_id=flow_id, name="local", schedules=[schedule])
        monkeypatch.setattr(module, "this_deployment", SimpleNamespace(id=str(made)))
        module._rest()
        found = client.read_deployment(made)
    assert [(item.slug, item.active) for item in found.schedules] == [("minutely", False)]
    assert not found.paused


def test_a_deployment_looks_by_the_clock_and_when_something_happens() -> None:
    made = deploy("run-1", "s3://b/runs", "sky", FleetSettings(max_islands=3), every=timedelta(seconds=45))
    (schedule,) = made.schedules
    assert schedule.schedule.interval == timedelta(seconds=45)
    (trigger,) = made.triggers
    assert set(trigger.expect) == set(EVENTS)
    assert made.parameters["settings"]["max_islands"] == 3
    properties = made._parameter_openapi_schema.properties
    assert "Islands" in str(made.description)
    assert set(properties) == {"run_id", "board", "machines", "settings", "job_group"}
    assert properties["machines"]["description"].startswith("Whose machines")
    assert Path(made.entrypoint.split(":")[0]).name == "fleet.py"
