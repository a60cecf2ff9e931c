"""Which version an island goes to next. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sprawl.rollout.wire import VersionPolicy

Follow = Literal["demand", "eager"]

LEAP = 16  # versions behind from which on an island goes straight to where it is needed


def next_target(follow: Follow, applied: int | None, head: int | None, waiting: Sequence[VersionPolicy]) -> int | None:
    """The version to put into service next, None to stay.

    With nothing applied: exactly the lowest version the waiting requests need (an open request needs the head, or its
    max_version). Later: one step, if a waiting request needs it or the island is eager; far behind, all the way to
    what the waiting requests need, or to the head.
    """
    if head is None:
        return None
    if applied is not None:
        needed = [policy.lowest for policy in waiting if policy.lowest > applied]
        if head <= applied or not (needed or follow == "eager"):
            return None
        return min([head, *needed]) if head - applied > LEAP else applied + 1
    if waiting:
        wanted = min(_first_version(policy, head) for policy in waiting)
        if wanted <= head:
            return wanted
    return head if follow == "eager" else None


def _first_version(policy: VersionPolicy, head: int) -> int:
    if policy.exact_version is not None or policy.min_version is not None:
        return policy.lowest
    return head if policy.highest is None else min(head, policy.highest)
