"""Falsifiers: what the ledger of a correct run can never say. Pure functions of the records.

Each check returns the violations it found, or None when the run gives it nothing to test (no anchor, no verify yet).
An empty list of violations is a claim about the checks that applied, and the report names those.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sprawl.report.data import RunData

RATIO_TOLERANCE = 1e-5

Found = list[str] | None


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


def _numbers(values: Iterable[int], limit: int = 8) -> str:
    """`3, 5, 9` or `3, 5, ... (42 in all)`."""
    values = list(values)
    shown = ", ".join(str(value) for value in values[:limit])
    return shown if len(values) <= limit else f"{shown}, ... ({len(values)} in all)"


def _steps_complete(data: RunData) -> Found:
    if not data.steps:
        return None
    counts = Counter(record.step for record in data.steps)
    found = []
    if missing := [step for step in range(data.since, data.last_step + 1) if step not in counts]:
        found.append(f"optimizer steps missing from the ledger: {_numbers(missing)}")
    if repeated := sorted(step for step, count in counts.items() if count > 1):
        found.append(f"optimizer steps recorded more than once: {_numbers(repeated)}")
    if shifted := [record.step for record in data.steps if record.version != record.step]:
        found.append(f"steps whose published version is not their number: {_numbers(shifted)}")
    return found


def _steps_applied(data: RunData) -> Found:
    if not data.steps:
        return None
    refused = [record.step for record in data.steps if not record.applied]
    return [f"steps refused for a non-finite gradient: {_numbers(refused)}"] if refused else []


def _ratio_is_one(data: RunData) -> Found:
    if not data.steps or data.setting("grpo.epochs") != 1 or data.setting("grpo.minibatches", 1) != 1:
        return None
    # NaN compares false with everything, so it has to be asked for.
    wrong = [record for record in data.steps if not record.ratio_max_error <= RATIO_TOLERANCE]
    if not wrong:
        return []
    worst = max(wrong, key=lambda record: math.inf if math.isnan(record.ratio_max_error) else record.ratio_max_error)
    return [
        f"PPO ratio off 1 on the first inner epoch at steps {_numbers(record.step for record in wrong)}"
        f" (worst {worst.ratio_max_error:.3g} at step {worst.step})"
    ]


def _staleness_bounded(data: RunData) -> Found:
    limit = data.setting("rollout.max_staleness")
    if not data.steps or limit is None:
        return None
    over = [record.step for record in data.steps if record.staleness_max > limit]
    return [f"rollouts more than max_staleness={limit} versions old at steps {_numbers(over)}"] if over else []


def _fires_counted(data: RunData, finished: bool) -> Found:
    if not data.setting("anchor.enabled", False):
        return [f"{len(data.fires)} anchor fires although anchor.enabled is false"] if data.fires else None
    every = data.setting("anchor.every")
    found = []
    if uneven := [record.step for record in data.fires if record.step % every]:
        found.append(f"fires at steps that are no multiple of c={every}: {_numbers(uneven)}")
    if repeated := [step for step, count in Counter(record.step for record in data.fires).items() if count > 1]:
        found.append(f"fires recorded more than once: {_numbers(repeated)}")
    expected = data.last_step // every
    # A run under way may still wait for its newest fire, but can never be ahead of its steps.
    if len(data.fires) > expected or (finished and len(data.fires) != expected):
        found.append(f"{len(data.fires)} fires, expected floor({data.last_step}/{every}) = {expected}")
    return found


def _anchor_lag(data: RunData) -> Found:
    lag = data.setting("anchor.lag")
    if not data.fires or lag is None:
        return None
    return [
        f"fire at step {record.step} used weights of step {record.newest_step}, newer than {record.step - lag} (t-K)"
        for record in data.fires
        if record.newest_step > record.step - lag
    ]


def _anchor_never_steps(data: RunData) -> Found:
    if not data.fires:
        return None
    return [
        f"fire at step {record.step} stepped an optimizer {record.optimizer_steps} times"
        for record in data.fires
        if record.optimizer_steps != 0
    ]


def _sign_map_size(data: RunData) -> Found:
    if not data.fires:
        return None
    found = []
    for record in data.fires:
        expected = -(-record.parameters // 8) + record.header_bytes
        if record.bytes != expected:
            found.append(
                f"sign map of step {record.step} has {record.bytes} bytes, expected {expected}"
                f" (one bit for each of {record.parameters} parameters + {record.header_bytes} header bytes)"
            )
    return found


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
        Check("fires", "fires = floor(steps / c)", lambda data: _fires_counted(data, done)),
        Check("anchor lag", "the anchor never sees weights newer than t-K", _anchor_lag),
        Check("anchor optimizer", "the anchor never steps an optimizer", _anchor_never_steps),
        Check("sign maps", "a sign map is one bit a parameter plus its header", _sign_map_size),
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
