"""Falsifiers: what the ledger of a correct run can never say. Pure functions of the records.

Each check returns the violations it found, or None when the run gives it nothing to test (no anchor, no verify yet).
An empty list of violations is a claim about the checks that applied, and the report names those.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sprawl.report.anchor_checks import anchor_lag, anchor_never_steps, fires_counted, sign_ages, sign_map_size
from sprawl.report.data import RunData
from sprawl.report.found import Found, numbers

RATIO_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Check:
    """One falsifier: `statement` is what holds in a correct run."""

    name: str
    statement: str
    find: Callable[[RunData], Found]


@dataclass(frozen=True)
class CheckResult:
    name: str
    statement: str
    applies: bool
    violations: list[str]


def _steps_complete(data: RunData) -> Found:
    if not data.steps:
        return None
    counts = Counter(record.step for record in data.steps)
    found = []
    if missing := [step for step in range(data.since, data.last_step + 1) if step not in counts]:
        found.append(f"optimizer steps missing from the ledger: {numbers(missing)}")
    if repeated := sorted(step for step, count in counts.items() if count > 1):
        found.append(f"optimizer steps recorded more than once: {numbers(repeated)}")
    if shifted := [record.step for record in data.steps if record.version != record.step]:
        found.append(f"steps whose published version is not their number: {numbers(shifted)}")
    return found


def _steps_applied(data: RunData) -> Found:
    if not data.steps:
        return None
    refused = [record.step for record in data.steps if not record.applied]
    return [f"steps refused for a non-finite gradient: {numbers(refused)}"] if refused else []


def _ratio_is_one(data: RunData) -> Found:
    if not data.steps or data.setting("grpo.epochs") != 1 or data.setting("grpo.minibatches", 1) != 1:
        return None
    # NaN compares false with everything, so it has to be asked for.
    wrong = [record for record in data.steps if not record.ratio_max_error <= RATIO_TOLERANCE]
    if not wrong:
        return []
    worst = max(wrong, key=lambda record: math.inf if math.isnan(record.ratio_max_error) else record.ratio_max_error)
    return [
        f"PPO ratio off 1 on the first inner epoch at steps {numbers(record.step for record in wrong)}"
        f" (worst {worst.ratio_max_error:.3g} at step {worst.step})"
    ]


def _staleness_bounded(data: RunData) -> Found:
    limit = data.setting("rollout.max_staleness")
    if not data.steps or limit is None:
        return None
    over = [record.step for record in data.steps if record.staleness_max > limit]
    return [f"rollouts more than max_staleness={limit} versions old at steps {numbers(over)}"] if over else []


def _trained_once(data: RunData) -> Found:
    feeds = [record.feed for record in data.steps if record.feed is not None]
    if not feeds:
        return None
    counts = Counter(number for feed in feeds for number in feed.prompts)
    repeated = sorted(number for number, count in counts.items() if count > 1)
    return [f"groups trained more than once, by the numbers of their prompts: {numbers(repeated)}"] if repeated else []


def _islands_verified(data: RunData) -> Found:
    """Final reports (island_report events carry the island's last record) and live heartbeats."""
    reports: list[tuple[str, Mapping[str, Any]]] = [
        (str(event.data.get("island_id", "?")), event.data) for event in data.events if event.kind == "island_report"
    ]
    reports += [(record.island_id, record.model_dump()) for record in data.islands]
    reports = [(name, report) for name, report in reports if "versions_applied" in report]
    if not reports:
        return None
    found = []
    for name, report in reports:
        applied, verified = report["versions_applied"], report.get("versions_verified", 0)
        message = f"island {name} verified {verified} of the {applied} versions it applied"
        if applied != verified and message not in found:
            found.append(message)
    return found


def _board_verified(data: RunData) -> Found:
    verifications = [event for event in data.events if event.kind == "verify"]
    if not verifications:
        return None
    problems = verifications[-1].data.get("problems") or []
    if isinstance(problems, list):
        return [f"board verification: {problem}" for problem in problems]
    return [f"board verification found {problems} problems"]


def _no_violation_events(data: RunData, already: set[str]) -> Found:
    """Violations a process wrote down itself, without those the other checks see as well."""
    return [
        f"step {event.step}: {event.message}"
        for event in data.events
        if event.kind == "violation" and event.message not in already
    ]


def run_checks(data: RunData, finished: bool | None = None) -> list[CheckResult]:
    """Every falsifier against the ledger.

    `finished` says whether all fires must be there by now; None: as the ledger's finish event says.
    """
    done = data.finished if finished is None else finished
    checks = (
        Check("steps", "every optimizer step is on the ledger exactly once", _steps_complete),
        Check("applied", "no step was refused for a non-finite gradient", _steps_applied),
        Check("ratio", f"|PPO ratio - 1| <= {RATIO_TOLERANCE:g} on the first inner epoch", _ratio_is_one),
        Check("staleness", "no rollout is older than rollout.max_staleness versions", _staleness_bounded),
        Check("stream", "a group of the stream is trained once", _trained_once),
        Check(
            "fires",
            "fires = floor(steps / c), not counting those the drift controller brought forward",
            lambda data: fires_counted(data, done),
        ),
        Check("anchor lag", "the anchor never sees weights newer than t-K", anchor_lag),
        Check(
            "anchor optimizer", "the anchor steps no optimizer and leaves its weights as they are", anchor_never_steps
        ),
        Check(
            "sign maps", "a sign map is one bit a parameter plus its header, when sent and when received", sign_map_size
        ),
        Check("sign ages", "every step names the sign map it used and its age", sign_ages),
        Check("islands", "every version an island applied was verified by root digest", _islands_verified),
        Check("board", "every published version rebuilds bit for bit", _board_verified),
    )
    results = [_result(check, check.find(data)) for check in checks]
    already = {violation for result in results for violation in result.violations}
    events = Check("events", "no process reported a violation", lambda data: _no_violation_events(data, already))
    return [*results, _result(events, events.find(data))]


def _result(check: Check, found: Found) -> CheckResult:
    return CheckResult(check.name, check.statement, found is not None, found or [])


def find_violations(data: RunData, finished: bool | None = None) -> list[str]:
    """One line per violation, empty for a clean ledger."""
    return [violation for result in run_checks(data, finished) for violation in result.violations]
