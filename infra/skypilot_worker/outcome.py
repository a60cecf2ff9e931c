"""How the end of a job reads as the end of a flow run. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from .port import JobState

# As a shell says it, so that Prefect's own explanations of exit codes fit.
CODES = {
    JobState.SUCCEEDED: 0,
    JobState.FAILED: 1,
    JobState.FAILED_SETUP: 1,
    JobState.FAILED_DRIVER: 137,
    JobState.CANCELLED: 143,
}
WORDS = {
    JobState.FAILED: "the job failed",
    JobState.FAILED_SETUP: "the setup script failed",
    JobState.FAILED_DRIVER: "SkyPilot's driver of the job was killed (out of memory?)",
    JobState.CANCELLED: "the job was cancelled in SkyPilot",
}
LOST = -1


@dataclass(frozen=True)
class Outcome:
    """`code`: what the worker reports, 0 where the flow run has said everything itself. `crash`: the message of the
    CRASHED state to propose. `cancelled`: the flow run was being cancelled, and now it is."""

    code: int
    crash: str | None = None
    cancelled: bool = False


def outcome_of(state: JobState | None, flow_state: str | None, *, lost: str | None = None) -> Outcome:
    """What the end of the infrastructure means for its flow run.

    `state`: how the job ended; None when its cluster was lost, for the reason `lost`. `flow_state`: the type of the
    flow run's state at that time, for example RUNNING; None when Prefect did not answer: a crash is then proposed, and
    refused by the server where the flow run had ended.
    """
    code = LOST if state is None else CODES[state]
    if flow_state in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
        return Outcome(0)  # said by the flow run itself; what the job did afterwards changes nothing
    if flow_state == "CANCELLING":
        return Outcome(0, cancelled=True)
    if state is None:
        return Outcome(code, f"The cluster was lost: {lost}")
    if state is not JobState.SUCCEEDED:
        return Outcome(code, f"The flow run was not finished, and {WORDS[state]}.")
    if flow_state in ("PENDING", "RUNNING"):
        did = "without starting the flow run" if flow_state == "PENDING" else "without finishing the flow run"
        return Outcome(1, f"The job ended with code 0 {did}.")
    return Outcome(0)  # SCHEDULED (a retry is due), PAUSED: machines given back on purpose; or nobody knows
