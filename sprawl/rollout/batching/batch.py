"""The running batch: who is computed in the next block, and what is sampled from it. No threads, no clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sprawl.rollout.batching.blocks import Blocks, Track
from sprawl.rollout.batching.groups import Branch, Group
from sprawl.rollout.batching.pages import PagePool
from sprawl.rollout.engine import EngineError
from sprawl.rollout.sampling import BROKEN, sample, uniforms


@dataclass(frozen=True)
class Work:
    """`due` positions of a track that have to be computed: a prompt's, or those of one sample of the group."""

    group: Group
    branch: Branch | None
    track: Track
    due: int


class Batch:
    """Requests join it and leave it between two blocks.

    A sample is admitted when pages are free for all the tokens it may generate, so nothing that runs is ever put back;
    requests are admitted in the order they came, so none is passed by forever. In a block every running sample gets one
    row, and every prompt that is being read as many as are left; when there are more than a block holds, they take
    turns.
    """

    def __init__(self, blocks: Blocks, pool: PagePool) -> None:
        self._blocks = blocks
        self._pool = pool
        self._queue: deque[Group] = deque()  # groups with samples that have no pages yet
        self._groups: list[Group] = []  # groups that have pages
        self._clock = 0
        self.tokens = 0  # generated so far
        self.completed = 0  # groups
        self.recomputed = 0  # groups whose cache was computed again

    def add(self, group: Group) -> None:
        self._queue.append(group)

    @property
    def idle(self) -> bool:
        return not self._queue and not self._groups

    @property
    def queued(self) -> int:
        """Groups that hold nothing yet."""
        return sum(group.trunk is None for group in tuple(self._queue))  # asked for by another thread

    @property
    def running(self) -> int:
        """Samples that hold pages."""
        return sum(len(group.branches) for group in self._groups)

    def forget(self) -> None:
        """The weights changed: what was computed with the old ones is computed again before the next token."""
        self.recomputed += sum(group.forget() for group in self._groups)

    def fail(self, error: EngineError) -> None:
        """End all requests."""
        for group in self._all():
            self._leave(group, error)

    def step(self, version: int) -> None:
        """One block and one token for every sample whose turn came. `version`: the weights in use."""
        for group in self._all():
            if group.cancelled.is_set():
                self._leave(group, EngineError("the request was cancelled"))
        self._admit()
        self._continue(self._choose(), version)
        self._begin(version)

    # --- who takes part ---

    def _all(self) -> list[Group]:
        return list(dict.fromkeys((*self._groups, *self._queue)))

    def _admit(self) -> None:
        while self._queue and self._queue[0].pages_needed() <= self._pool.free:
            group = self._queue[0]
            if group.trunk is None:
                self._groups.append(group)
            group.take(self._pool)
            if not group.waiting:
                self._queue.popleft()

    def _choose(self) -> list[tuple[Work, int]]:
        """Work for the next block and how many rows of it, at most a block's in all."""
        works = list(self._work())
        if sum(work.due for work in works) > self._blocks.limit:
            works.sort(key=lambda work: work.track.served)  # stable: those that waited longest, then as they came
        self._clock += 1
        chosen, room = [], self._blocks.limit
        for work in works:
            if room == 0:
                break
            count = min(work.due, room)
            chosen.append((work, count))
            room -= count
            work.track.served = self._clock
        return chosen

    def _work(self) -> Iterator[Work]:
        for group in self._groups:
            trunk = group.trunk
            assert trunk is not None
            if trunk.done < len(trunk.tokens):
                yield Work(group, None, trunk, len(trunk.tokens) - trunk.done)
                continue
            for branch in group.branches:
                if len(branch.track.tokens) > len(group.prompt):
                    yield Work(group, branch, branch.track, len(branch.track.tokens) - branch.track.done)

    # --- what comes out ---

    def _continue(self, chosen: list[tuple[Work, int]], version: int) -> None:
        """Compute a block. Samples whose last token was in it get their next one."""
        if not chosen:
            return
        hidden = self._blocks.hidden([(work.track, count) for work, count in chosen])
        complete = [at for at, (work, _) in enumerate(chosen) if work.track.done == len(work.track.tokens)]
        if not complete:
            return
        logits = self._blocks.logits(hidden[complete])
        draws: list[tuple[Group, Branch]] = []
        rows: list[int] = []
        for row, at in enumerate(complete):
            group, branch = chosen[at][0].group, chosen[at][0].branch
            if branch is None:
                group.first = logits[row].clone()
                for each in group.branches:
                    group.fork(each, self._pool)
            else:
                draws.append((group, branch))
                rows.append(row)
        if draws:
            self._draw(draws, logits if len(rows) == len(logits) else logits[rows], version)

    def _begin(self, version: int) -> None:
        """First tokens of the samples whose prompt is read."""
        fresh = [
            (group, branch)
            for group in self._groups
            if group.first is not None
            for branch in group.branches
            if len(branch.track.tokens) == len(group.prompt)
        ]
        for at in range(0, len(fresh), self._blocks.limit):
            draws = fresh[at : at + self._blocks.limit]
            self._draw(draws, torch.stack([group.first for group, _ in draws if group.first is not None]), version)

    def _draw(self, draws: list[tuple[Group, Branch]], logits: Tensor, version: int) -> None:
        """Sample a token for every row of `logits` and record it."""
        positions = [len(branch.track.tokens) - len(group.prompt) for group, branch in draws]
        numbers = uniforms([branch.seed for _, branch in draws], positions)
        tokens, logprobs = sample(logits, [group.params.temperature for group, _ in draws], numbers)
        for (group, branch), token, logprob in zip(draws, tokens, logprobs, strict=True):
            if group.future.done():
                continue  # another of its samples has just failed
            if token == BROKEN:
                self._leave(group, EngineError(f"version {version} produced non-finite logits"))
            else:
                self._record(group, branch, token, logprob, version)

    def _record(self, group: Group, branch: Branch, token: int, logprob: float, version: int) -> None:
        row = branch.row
        branch.track.tokens.append(token)
        row.push(token, logprob, version, group.stops, group.params.max_new_tokens)
        self.tokens += 1
        try:
            if group.watch is not None and group.watch(branch.index, token, logprob):
                row.finished = "stop"
        except Exception as error:
            self._leave(group, EngineError(f"the request's watch failed: {type(error).__name__}: {error}"))
            return
        if row.finished is not None:
            group.finish(branch, self._pool)
            if group.complete:
                self._leave(group, None)

    def _leave(self, group: Group, error: EngineError | None) -> None:
        """Take a group out, with its samples or with an error."""
        group.release(self._pool)
        if group in self._groups:
            self._groups.remove(group)
        if group in self._queue:
            self._queue.remove(group)
        if error is None:
            self.completed += 1
            group.future.set_result([row.sample() for row in group.rows])
        else:
            group.future.set_exception(error)
