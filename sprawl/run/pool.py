"""The groups of a stream, as a pure state machine: which prompt is asked for next and from which version on, what
becomes of a group that is finished, and which groups make the next batch.

A group can be trained at a step while its oldest token is at most `max_staleness` versions behind the weights that the
step trains. So what is sampled right after the batch of step t was taken is good for the steps t + 1 to
t + max_staleness, and that many batches are kept under way while the trainer trains: more would only grow too old. When
the trainer has to wait, spare groups are asked for as well, up to `in_flight`, so that it never waits for a straggler
while other groups could be had. A group in flight that is too old by now unless it was started late is a straggler: it
is no supply any more, and counts against `in_flight` only.

A number is in exactly one place: not asked for yet, asked for again (`again`), in flight, ready, trained, or given up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

from sprawl.rollout.feed import FeedState

T = TypeVar("T")


@dataclass(frozen=True)
class PoolLimits:
    """wanted: groups of a batch. in_flight: groups asked for and neither trained nor given up, at most. drops: groups
    without an advantage that may be left out for a step. steps: optimizer steps of the run."""

    wanted: int
    max_staleness: int
    in_flight: int
    drops: int
    steps: int


@dataclass(frozen=True)
class Asked:
    """A prompt that is to be sampled by `min_version` or a later one; `newest` was the newest version then."""

    number: int
    min_version: int
    newest: int
    at: float


@dataclass(frozen=True)
class Ready(Generic[T]):
    """A finished group that waits for a batch. oldest: version of its oldest token. score: its samples' mean."""

    number: int
    value: T
    oldest: int
    score: float
    asked_at: float
    finished_at: float


@dataclass(frozen=True)
class Choice(Generic[T]):
    """The batch that could be taken now. dropped, dropped_score: groups left out for it; the sum of their scores."""

    groups: tuple[Ready[T], ...]
    feed: FeedState
    dropped: int
    dropped_score: float


class Pool(Generic[T]):
    """`step`: the newest step whose batch is durable; `state`: where that batch left the stream, None before the first.

    Times are seconds of any one clock.
    """

    def __init__(self, limits: PoolLimits, step: int = 0, state: FeedState | None = None) -> None:
        self.limits = limits
        self.step = step
        self.version = 0  # the newest published
        self._next = state.next_prompt if state is not None else 0
        self._again = list(state.under_way) if state is not None else []
        self._asked: dict[int, Asked] = {}
        self._ready: list[Ready[T]] = []
        self._failures: Counter[int] = Counter()
        self._waiting = False
        self._discarded = self._failed = self._dropped = 0
        self._dropped_score = 0.0

    @property
    def floor(self) -> int:
        """The oldest version that the next batch may contain."""
        return max(0, self.step - self.limits.max_staleness)

    @property
    def outstanding(self) -> int:
        """Groups in flight and ready."""
        return len(self._asked) + len(self._ready)

    @property
    def complete(self) -> bool:
        """Every batch of the run was taken."""
        return self.step >= self.limits.steps

    def published(self, version: int) -> None:
        self.version = max(self.version, version)

    def ask(self, now: float) -> Asked | None:
        """The next prompt to ask for, which is in flight from now on; None while enough is under way, or while the
        version that it would need is not published."""
        limits, ahead = self.limits, max(1, self.limits.max_staleness)
        if self.complete or self.floor > self.version or self.outstanding >= limits.in_flight:
            return None
        stragglers = sum(asked.newest < self.floor for asked in self._asked.values())
        useful = limits.wanted * min(ahead, limits.steps - self.step)
        if not self._waiting and self.outstanding - stragglers >= useful:
            return None
        if self._again:
            number = self._again.pop(0)
        else:
            number, self._next = self._next, self._next + 1
        self._asked[number] = asked = Asked(number, self.floor, self.version, now)
        return asked

    def finish(self, number: int, value: T, *, oldest: int, informative: bool, score: float, now: float) -> None:
        """A group came. One that is too old is given up; so is one without an advantage, while its step may leave out
        some."""
        asked = self._asked.pop(number)
        if oldest < self.floor:
            self._discarded += 1
        elif not informative and self._dropped < self.limits.drops:
            self._dropped += 1
            self._dropped_score += score
        else:
            self._ready.append(Ready(number, value, oldest, score, asked.at, now))

    def fail(self, number: int) -> int:
        """A request ended without a group and is asked for again, first of all. Returns how often it failed by now."""
        del self._asked[number]
        self._again.insert(0, number)
        self._failed += 1
        self._failures[number] += 1
        return self._failures[number]

    def choose(self, now: float) -> Choice[T] | None:
        """The batch of step `step` + 1: the groups that were finished first, of those that are not too old. They stay
        here until `commit`. None while there are too few: the trainer waits then."""
        self._evict()
        wanted = self.limits.wanted
        self._waiting = len(self._ready) < wanted
        if self._waiting:
            return None
        taken, left = self._ready[:wanted], self._ready[wanted:]
        waited = [now - group.finished_at for group in taken]
        feed = FeedState(
            prompts=tuple(group.number for group in taken),
            next_prompt=self._next,
            under_way=tuple(sorted([*self._asked, *self._again, *(group.number for group in left)])),
            discarded=self._discarded,
            failed=self._failed,
            in_flight=len(self._asked),
            ready=len(left),
            queue_seconds=sum(waited) / wanted,
            queue_seconds_max=max(waited),
        )
        return Choice(tuple(taken), feed, self._dropped, self._dropped_score)

    def commit(self, choice: Choice[T]) -> None:
        """The chosen batch is durable: its step's batch is taken."""
        gone = set(choice.feed.prompts)
        self._ready = [group for group in self._ready if group.number not in gone]
        self._discarded -= choice.feed.discarded
        self._failed -= choice.feed.failed
        self._dropped -= choice.dropped
        self._dropped_score -= choice.dropped_score
        self.step += 1
        self._evict()

    def _evict(self) -> None:
        fresh = [group for group in self._ready if group.oldest >= self.floor]
        self._discarded += len(self._ready) - len(fresh)
        self._ready = fresh
