"""The admission gate: one lock for requests and version changes, so that a request is attributed to the version that
really generated it.

`GateState` is the pure state machine; every method is one atomic transition. `Gate` adds waiting. A commit goes
propose -> (wait until `may_commit`) -> begin -> install -> finish; between begin and finish nothing is admitted.

- `in_place`: a request that accepts both versions is admitted at once and is carried over the swap; only requests that
  accept the old version alone hold the commit back.
- `quiesce`: every active request holds the commit back, so a request that also accepts the new version waits for it.

Requests that need exactly the old version are still admitted while a commit waits, for `patience_s` seconds at most;
after that they are refused (retryable), so that no stream of them can starve a version.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from sprawl.rollout.wire import NotReady, VersionPolicy

CommitMode = Literal["in_place", "quiesce"]
Verdict = Literal["admit", "wait", "passed", "held", "closed"]


class Refused(Exception):
    """The request cannot be served here: the flat 409."""

    def __init__(self, answer: NotReady) -> None:
        self.answer = answer
        super().__init__(answer.message)


class GateClosed(Exception):
    """Nothing is served any more (terminal failure or draining) or nothing is served yet: 503."""


class CommitUndone(Exception):
    """A commit failed and everything is as it was before: the old version is served on."""


@dataclass(frozen=True)
class Ticket:
    """Leave to generate. `version` is the one applied at admission; a swap during generation may raise it."""

    number: int
    policy: VersionPolicy
    version: int


@dataclass
class GateState:
    """Pure: who is active, which version is applied, which one waits to be."""

    mode: CommitMode
    version: int | None = None
    pending: int | None = None
    committing: bool = False
    overdue: bool = False
    closed: str | None = None
    active: dict[int, VersionPolicy] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def verdict(self, policy: VersionPolicy) -> Verdict:
        if self.closed is not None:
            return "closed"
        if self.committing or self.version is None or self.version < policy.lowest:
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
        ticket = Ticket(next(self._numbers), policy, self.version)
        self.active[ticket.number] = policy
        return ticket

    def leave(self, ticket: Ticket) -> None:
        self.active.pop(ticket.number, None)

    def propose(self, version: int) -> None:
        if self.pending is not None:
            raise RuntimeError(f"version {self.pending} is already waiting to be committed")
        self.pending, self.overdue = version, False

    def may_commit(self) -> bool:
        if self.pending is None:
            return False
        if self.mode == "quiesce":
            return not self.active
        return all(policy.accepts(self.pending) for policy in self.active.values())

    def begin(self) -> None:
        assert self.may_commit()
        self.committing = True

    def finish(self) -> None:
        assert self.committing
        assert self.pending is not None
        self.version = self.pending
        self.committing = False
        self.withdraw()

    def abandon(self) -> None:
        """The commit that was begun is not to be."""
        assert self.committing
        self.committing = False
        self.withdraw()

    def withdraw(self) -> None:
        self.pending, self.overdue = None, False


class Gate:
    """The state machine with waiting. Belongs to one event loop. `wake` is set whenever a request starts to wait."""

    def __init__(self, mode: CommitMode, wake: asyncio.Event, *, patience_s: float = 30.0) -> None:
        self.state = GateState(mode)
        self.wake = wake
        self.patience_s = patience_s
        self._waiting: dict[int, VersionPolicy] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()

    @property
    def version(self) -> int | None:
        return self.state.version

    @property
    def active(self) -> int:
        return len(self.state.active)

    @property
    def waiting(self) -> list[VersionPolicy]:
        """Policies of the requests that wait for a version, oldest first: the demand the reconciler follows."""
        return list(self._waiting.values())

    @asynccontextmanager
    async def admit(self, policy: VersionPolicy, timeout_s: float) -> AsyncIterator[Ticket]:
        """Hold a ticket for the body of the `async with`, waiting at most `timeout_s` for an acceptable version.

        Raises Refused (409) or GateClosed (503).
        """
        ticket = await self._enter(policy, timeout_s)
        try:
            yield ticket
        finally:
            self.state.leave(ticket)
            self._notify()

    async def commit(self, version: int, install: Callable[[], Awaitable[None]]) -> None:
        """Wait until every active request lets `version` in, then run `install` with admission shut.

        An exception of `install` closes the gate for good: what it left behind is not known. Only CommitUndone says
        that it is, and leaves the gate open at the old version.
        """
        self.state.propose(version)
        self._notify()
        try:
            await self._until_free(time.monotonic() + self.patience_s)
            self.state.begin()
            try:
                await install()
            except CommitUndone:
                self.state.abandon()
                raise
            except BaseException as error:
                self.close(f"version {version} could not be put into service: {error}")
                raise
            self.state.finish()
        finally:
            self.state.withdraw()
            self._notify()

    def close(self, reason: str) -> None:
        """Admit nothing any more. The first reason stands."""
        self.state.closed = self.state.closed or reason
        self._notify()

    async def idle(self) -> None:
        """Return once no request is active."""
        while self.state.active:
            await self._next(None)

    async def _enter(self, policy: VersionPolicy, timeout_s: float) -> Ticket:
        deadline = time.monotonic() + timeout_s
        number = next(self._numbers)
        try:
            while True:
                verdict = self.state.verdict(policy)
                if verdict == "admit":
                    return self.state.admit(policy)
                if verdict == "closed":
                    raise GateClosed(self.state.closed)
                if verdict != "wait":
                    raise Refused(_refusal(verdict, policy, self.state.version))
                if time.monotonic() >= deadline:
                    if policy == VersionPolicy():
                        raise GateClosed("no version is in service yet")
                    raise Refused(_refusal(verdict, policy, self.state.version))
                if number not in self._waiting:
                    self._waiting[number] = policy
                    self.wake.set()
                await self._next(deadline)
        finally:
            self._waiting.pop(number, None)

    async def _until_free(self, overdue_at: float) -> None:
        while not self.state.may_commit():
            if self.state.closed is not None:
                raise GateClosed(self.state.closed)
            await self._next(None if self.state.overdue else overdue_at)
            if time.monotonic() >= overdue_at:
                self.state.overdue = True

    async def _next(self, deadline: float | None) -> None:
        """Sleep until the state changed or the deadline passed."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        with suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it swallows a cancellation that meets a wake-up.
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _refusal(verdict: Verdict, policy: VersionPolicy, applied: int | None) -> NotReady:
    if verdict == "passed":
        target = policy.highest
        assert target is not None
        message = f"version {target} was already passed: this island serves {applied} and never goes back"
        return NotReady(target_version=target, applied=applied, message=message, retryable=False)
    if verdict == "held":
        target = policy.lowest
        message = f"version {applied} is being replaced: requests for it alone are no longer admitted here"
        return NotReady(target_version=target, applied=applied, message=message, retryable=True)
    target = policy.lowest
    now = "nothing yet" if applied is None else f"version {applied}"
    message = f"version {target} did not arrive in time: this island serves {now}"
    return NotReady(target_version=target, applied=applied, message=message, retryable=True)
