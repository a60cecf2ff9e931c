"""The admission gate: one lock for requests and version changes, so that a request is attributed to the version that
really generated it.

`GateState` (see `sprawl.rollout.gate_state`) decides, purely; `Gate` adds waiting. It belongs to one event loop, and no
transition awaits anything: that is the lock.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from sprawl.rollout.gate_state import CommitMode, GateState, Rewind, Ticket, Verdict, refusal
from sprawl.rollout.wire import NotReady, VersionPolicy

__all__ = ["CommitMode", "CommitUndone", "Gate", "GateClosed", "GateState", "Refused", "Rewind", "Ticket", "Verdict"]


class Refused(Exception):
    """The request cannot be served here: the flat 409."""

    def __init__(self, answer: NotReady) -> None:
        self.answer = answer
        super().__init__(answer.message)


class GateClosed(Exception):
    """Nothing is served any more (terminal failure or draining) or nothing is served yet: 503."""


class CommitUndone(Exception):
    """A commit failed and everything is as it was before: the old version is served on."""


class Gate:
    """The state machine with waiting. `wake` is set whenever a request starts to wait.

    `patience_s`: how long requests for exactly the old version are still admitted while a commit waits for them.
    """

    def __init__(
        self, mode: CommitMode, wake: asyncio.Event, *, patience_s: float = 30.0, run_id: str | None = None
    ) -> None:
        self.state = GateState(mode, run_id=run_id)
        self.wake = wake
        self.patience_s = patience_s
        self._waiting: dict[int, VersionPolicy] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()

    @property
    def version(self) -> int | None:
        return self.state.version

    @property
    def run_id(self) -> str | None:
        """The run whose version is in service."""
        return self.state.run_id

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

        Raises Rewind when `version` does not come after the one in service, and GateClosed. An exception of `install`
        closes the gate for good: what it left behind is not known. Only CommitUndone says that it is, and leaves the
        gate open at the old version.
        """
        self.state.propose(version)
        await self._carry_out(install)

    async def switch(self, run_id: str, version: int, install: Callable[[], Awaitable[None]]) -> None:
        """Go over to `version` of `run_id`, which may be any: numbers start anew in another run.

        Admission shuts at once, every request in flight is drained, then `install` runs as in `commit`. Requests that
        named versions of the run left behind are refused (retryable), open ones are served by the new run. The run
        that is in service already is an ordinary `commit`.
        """
        self.state.propose(version, run_id)
        await self._carry_out(install)

    def close(self, reason: str) -> None:
        """Admit nothing any more. The first reason stands."""
        self.state.closed = self.state.closed or reason
        self._notify()

    async def idle(self) -> None:
        """Return once no request is active."""
        while self.state.active:
            await self._next(None)

    async def _carry_out(self, install: Callable[[], Awaitable[None]]) -> None:
        self._notify()
        try:
            await self._until_free(self._now() + self.patience_s)
            version = self.state.pending
            self.state.begin()
            try:
                await install()
            except CommitUndone:
                self.state.abandon()
                raise
            except BaseException as error:
                self.state.fail(f"version {version} could not be put into service: {error}")
                raise
            self.state.finish()
        finally:
            self.state.withdraw()
            self._notify()

    async def _enter(self, policy: VersionPolicy, timeout_s: float) -> Ticket:
        deadline = self._now() + timeout_s
        epoch = self.state.epoch
        number = next(self._numbers)
        try:
            while True:
                verdict = self.state.verdict(policy, epoch)
                if verdict == "admit":
                    return self.state.admit(policy)
                if verdict == "closed":
                    raise GateClosed(self.state.closed)
                if verdict != "wait":
                    raise Refused(refusal(self.state, verdict, policy))
                if self._now() >= deadline:
                    if policy.open:
                        raise GateClosed(self._why_nothing())
                    raise Refused(refusal(self.state, verdict, policy))
                if number not in self._waiting:
                    self._waiting[number] = policy
                    self.wake.set()
                await self._next(deadline)
        finally:
            self._waiting.pop(number, None)

    def _why_nothing(self) -> str:
        if self.state.version is None:
            return "no version is in service yet"
        return f"version {self.state.pending} is being put into service"

    async def _until_free(self, overdue_at: float) -> None:
        while True:
            if self.state.closed is not None:
                raise GateClosed(self.state.closed)
            if self.state.may_commit():
                return
            await self._next(None if self.state.overdue else overdue_at)
            if self._now() >= overdue_at:
                self.state.overdue = True

    async def _next(self, deadline: float | None) -> None:
        """Sleep until the state changed or the deadline (of the loop's clock) passed."""
        timeout = None if deadline is None else max(0.0, deadline - self._now())
        with suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it swallows a cancellation that meets a wake-up.
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
