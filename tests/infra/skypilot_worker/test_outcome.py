"""How jobs end, read as ends of flow runs."""

from __future__ import annotations

import pytest

from infra.skypilot_worker.outcome import Outcome, outcome_of
from infra.skypilot_worker.port import JobState

FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
ENDED = [state for state in JobState if state.ended]


@pytest.mark.parametrize("state", [*ENDED, None])
@pytest.mark.parametrize("flow", FINAL)
def test_what_the_flow_run_said_itself_stands(state: JobState | None, flow: str) -> None:
    assert outcome_of(state, flow, lost="gone") == Outcome(0)


@pytest.mark.parametrize("state", [*ENDED, None])
def test_a_flow_run_that_is_being_cancelled_is_cancelled(state: JobState | None) -> None:
    assert outcome_of(state, "CANCELLING", lost="gone") == Outcome(0, cancelled=True)


@pytest.mark.parametrize("flow", ["PENDING", "RUNNING", None])
@pytest.mark.parametrize("state", [*ENDED, None])
def test_an_unfinished_flow_run_crashes_whatever_ended_it(state: JobState | None, flow: str | None) -> None:
    if flow is None and state is JobState.SUCCEEDED:
        return  # nothing speaks of a crash
    outcome = outcome_of(state, flow, lost="taken away")
    assert outcome.code != 0
    assert outcome.crash
    assert not outcome.cancelled
    if state is None:
        assert "taken away" in outcome.crash


@pytest.mark.parametrize("flow", ["SCHEDULED", "PAUSED"])
def test_a_flow_run_may_give_its_machines_back(flow: str) -> None:
    assert outcome_of(JobState.SUCCEEDED, flow) == Outcome(0)
