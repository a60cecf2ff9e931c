"""The admission gate as a pure state machine: who is active, which version of which run is in service, which one waits
to be. Every method is one atomic transition; `sprawl.rollout.gate.Gate` adds the waiting.

A commit goes propose -> (wait until `may_commit`) -> begin -> install -> finish; between begin and finish nothing is
admitted.

- `in_place`: a request that accepts both versions is admitted at once and is carried over the swap; only requests that
  accept the old version alone hold the commit back.
- `quiesce`: every active request holds the commit back, so a request that also accepts the new version waits for it.
- A switch to another run drains every request in either mode: a generation may cross an update, never a change of run.
  Version numbers mean nothing across runs, so a request that names versions belongs to the run that was in service when
  it came, and is sent elsewhere by a switch.

Within a run the version strictly increases. Requests that need exactly the old version are still admitted while a
commit waits, until it is `overdue`; after that they are refused (retryable), so that no stream of them can starve it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

from sprawl.errors import SprawlError
from sprawl.rollout.wire import NotReady, VersionPolicy

CommitMode = Literal["in_place", "quiesce"]
Verdict = Literal["admit", "wait", "passed", "held", "moved", "elsewhere", "closed"]


class Rewind(SprawlError):
    """A version that does not come after the one in service. Nothing was changed."""


@dataclass(frozen=True)
class Ticket:
    """Leave to generate. `version` is the one applied at admission; a swap during generation may raise it.

    `begun` is the number of commits begun by then: while it is still that, every token is of `version`.
    """

    number: int
    policy: VersionPolicy
    version: int
    run_id: str | None = None
    begun: int = 0


@dataclass
class GateState:
    """`epoch` counts the runs that were switched to, `begun` the commits that were begun."""

    mode: CommitMode
    version: int | None = None
    run_id: str | None = None
    pending: int | None = None
    pending_run: str | None = None  # set while the pending version is one of another run
    committing: bool = False
    overdue: bool = False
    closed: str | None = None
    epoch: int = 0
    begun: int = 0
    active: dict[int, VersionPolicy] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def verdict(self, policy: VersionPolicy, epoch: int | None = None) -> Verdict:
        """What happens now to a request that came in `epoch` (default: the present one)."""
        if self.closed is not None:
            return "closed"
        if policy.run_id is not None:
            if policy.run_id == self.pending_run:
                return "wait"
            if policy.run_id != self.run_id or self.pending_run is not None:
                return "elsewhere"
        elif not policy.open and (self.pending_run is not None or epoch not in (None, self.epoch)):
            return "moved"
        if self.committing or self.pending_run is not None or self.version is None or self.version < policy.lowest:
            return "wait"
        if not policy.accepts(self.version):
            return "passed"
        if self.pending is not None:
            accepts_both = policy.accepts(self.pending)
            if accepts_both and self.mode == "quiesce":
                return "wait"
            if not accepts_both and self.overdue:
                return "held"
        return "admit"

    def admit(self, policy: VersionPolicy) -> Ticket:
        assert self.version is not None
        assert self.verdict(policy) == "admit"
        ticket = Ticket(next(self._numbers), policy, self.version, self.run_id, self.begun)
        self.active[ticket.number] = policy
        return ticket

    def leave(self, ticket: Ticket) -> None:
        self.active.pop(ticket.number, None)

    def propose(self, version: int, run_id: str | None = None) -> None:
        """Ask for `version` of the run in service, or of another one. Raises Rewind, changing nothing."""
        if self.pending is not None:
            raise RuntimeError(f"version {self.pending} is already waiting to be committed")
        other_run = run_id is not None and run_id != self.run_id
        if not other_run and self.version is not None and version <= self.version:
            raise Rewind(
                f"version {version} does not come after version {self.version}, which is in service",
                "a version number is used once; publish the state as a new version, or as another run",
            )
        self.pending, self.pending_run, self.overdue = version, run_id if other_run else None, False

    def may_commit(self) -> bool:
        if self.pending is None:
            return False
        if self.mode == "quiesce" or self.pending_run is not None:
            return not self.active
        return all(policy.accepts(self.pending) for policy in self.active.values())

    def begin(self) -> None:
        assert self.may_commit()
        assert self.closed is None
        self.committing = True
        self.begun += 1

    def finish(self) -> None:
        assert self.committing
        assert self.pending is not None
        self.version = self.pending
        if self.pending_run is not None:
            self.run_id = self.pending_run
            self.epoch += 1
        self.committing = False
        self.withdraw()

    def fail(self, reason: str) -> None:
        """The install broke off: what it left behind is not known, so nothing is admitted any more."""
        assert self.committing
        self.closed = self.closed or reason
        self.committing = False
        self.withdraw()

    def abandon(self) -> None:
        """The install undid itself: everything is as it was before the commit began."""
        assert self.committing
        self.committing = False
        self.withdraw()

    def withdraw(self) -> None:
        self.pending, self.pending_run, self.overdue = None, None, False

    @property
    def newest(self) -> int | None:
        """The highest version that can have made a token by now: a swap shows before `finish` says so."""
        return self.pending if self.committing else self.version


def refusal(state: GateState, verdict: Verdict, policy: VersionPolicy) -> NotReady:
    """The flat 409 of a request that is not admitted. `retryable`: the same request may succeed later or elsewhere."""
    applied = state.version
    if verdict == "passed":
        target = policy.highest
        assert target is not None
        message = f"version {target} was already passed: this island serves {applied} and never goes back"
        return NotReady(target_version=target, applied=applied, message=message, retryable=False)
    now = "nothing yet" if applied is None else f"version {applied}"
    messages: dict[Verdict, str] = {
        "held": f"version {applied} is being replaced: requests for it alone are no longer admitted here",
        "moved": f"this island goes over to run {state.pending_run or state.run_id}, whose versions are others",
        "elsewhere": f"run {policy.run_id} is not served here: this island serves run {state.run_id}",
    }
    message = messages.get(verdict, f"version {policy.lowest} did not arrive in time: this island serves {now}")
    return NotReady(target_version=policy.lowest, applied=applied, message=message, retryable=True)
