"""Flow runs that died: who is started again, by whom, and how often."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from infra.limits import MAX_ATTEMPTS, SEGMENT
from infra.recovery import RESUME, UNSEEN_S, ZOMBIE, Plan, Seen, again, automations, plan, templates

TRAIN, OTHER = uuid4(), uuid4()
T0 = datetime(2026, 1, 1, tzinfo=UTC)


def run(state: str, since_s: float = 1000.0, at_s: float = 0.0, deployment: UUID = TRAIN, **parameters: Any) -> Seen:
    return Seen(uuid4(), deployment, state, since_s, T0 + timedelta(seconds=at_s), parameters)


def test_a_flow_run_without_a_process_has_crashed_however_short_ago_it_said_so() -> None:
    alive, dead, leaving = run("RUNNING"), run("RUNNING", since_s=1), run("CANCELLING")
    assert plan([alive, dead, leaving], [str(alive.id)], [TRAIN]) == Plan(crashed=(dead.id, leaving.id))


def test_a_pending_one_gets_time_to_start_before_it_is_scheduled_again() -> None:
    starting, stuck = run("PENDING", since_s=UNSEEN_S / 2), run("PENDING", since_s=UNSEEN_S * 2)
    assert plan([starting, stuck], [], [TRAIN]) == Plan(stuck=(stuck.id,))


def test_a_crash_is_missed_when_nobody_went_on_with_the_same_run() -> None:
    crashed = run("CRASHED", run_id="r", attempt=2)
    assert plan([crashed], [], [TRAIN]).missed == (crashed,)
    for state in ("SCHEDULED", "RUNNING", "COMPLETED", "CRASHED", "FAILED", "CANCELLED"):
        later = run(state, since_s=1, at_s=5, resume="r", attempt=3)
        assert plan([crashed, later], [str(later.id)], [TRAIN]).missed == (), state
    unrelated = run("RUNNING", at_s=5, run_id="other")
    assert plan([crashed, unrelated], [str(unrelated.id)], [TRAIN]).missed == (crashed,)
    earlier = run("COMPLETED", at_s=-5, run_id="r")
    assert plan([crashed, earlier], [], [TRAIN]).missed == (crashed,)


def test_a_crash_before_the_run_had_a_name_is_known_by_what_it_would_have_been_made_from() -> None:
    crashed = run("CRASHED", config="a.yaml")
    assert plan([crashed, run("RUNNING", at_s=9, config="b.yaml")], [], [TRAIN]).missed == (crashed,)
    assert plan([crashed, run("SCHEDULED", at_s=9, config="a.yaml", attempt=1)], [], [TRAIN]).missed == ()


@pytest.mark.parametrize(
    "left_alone",
    [
        run("CRASHED", since_s=UNSEEN_S / 2, run_id="r"),  # the automation has its turn first
        run("CRASHED", run_id="r", attempt=MAX_ATTEMPTS),
        run("CRASHED", deployment=OTHER, run_id="r"),
        run("FAILED", run_id="r"),
        run("CANCELLED", run_id="r"),
    ],
    ids=["just now", "too often", "another flow", "failed", "cancelled"],
)
def test_others_are_left_alone(left_alone: Seen) -> None:
    assert plan([left_alone], [], [TRAIN]) == Plan()


def test_the_next_one_names_the_run_and_counts() -> None:
    found = again({"config": "c.yaml", "run_id": "r", "board": "/b", "overrides": ["steps=3"], "attempt": 4, "x": 1})
    assert found == {
        "config": "c.yaml",
        "run_id": "r",
        "board": "/b",
        "overrides": ["steps=3"],
        "fleet": "local",
        "resume": None,
        "segment": SEGMENT,
        "attempt": 5,
    }


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"config": "c.yaml", "attempt": None},
        {"config": 'it\'s "quoted" {{ 1 }}', "run_id": "r", "overrides": ["a=[1, 2]"], "segment": 7, "attempt": 99},
        {"resume": "r", "board": "s3://b/runs", "overrides": None},
    ],
)
def test_the_automation_says_the_same_in_prefects_templates(parameters: dict[str, Any]) -> None:
    """Rendered by the server's own engine: types survive, and what is missing gets its default."""
    from types import SimpleNamespace

    from prefect.server.events.actions import RunDeployment
    from prefect.utilities.schema_tools.hydration import HydrationContext, hydrate

    wanted: dict[str, Any] = dict(templates())
    RunDeployment._upgrade_v1_templates(wanted)
    context = {"flow_run": SimpleNamespace(parameters=parameters)}
    rendered = hydrate(wanted, HydrationContext(raise_on_error=True, render_jinja=True, jinja_context=context))
    assert rendered == again(parameters)


def test_both_automations_watch_ours_only() -> None:
    flow = uuid4()
    resume, zombie = automations([TRAIN], [flow])
    assert (resume.name, zombie.name) == (RESUME, ZOMBIE)
    assert f"prefect.deployment.{TRAIN}" in json.dumps(resume.trigger.model_dump(mode="json"))
    assert f"prefect.flow.{flow}" in json.dumps(zombie.trigger.model_dump(mode="json"))


def test_the_schema_of_the_parameter_ends_a_row_that_our_code_never_sees() -> None:
    from prefect.utilities.callables import parameter_schema

    from flows.post_train import post_train

    schema = parameter_schema(post_train.fn).model_dump_for_openapi()
    assert schema["properties"]["attempt"]["maximum"] == MAX_ATTEMPTS
