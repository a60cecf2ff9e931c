"""Requests while they are being generated: a group is one prompt and the samples that continue it."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from sprawl.rollout.batching.blocks import Track
from sprawl.rollout.batching.pages import PAGE, PagePool, pages_for
from sprawl.rollout.engine import Watch
from sprawl.rollout.rows import Row
from sprawl.rollout.wire import Sample, SamplingParams


@dataclass(eq=False)
class Branch:
    """One sample. Its track holds the prompt and what was sampled; the whole pages of the prompt belong to the group,
    `own` pages to the branch."""

    index: int
    row: Row
    seed: int
    track: Track
    own: list[int]


@dataclass(eq=False)
class Group:
    """One request. `first` are the logits after the prompt, fp32 [V], once they are known; samples that wait for pages
    start from them later. `waiting` are the samples without pages, `branches` those that have some. `taken` are the
    tokens that samples begin with because they were generated elsewhere: read like a prompt, drawn after like a sample.
    """

    prompt: list[int]
    params: SamplingParams
    seeds: list[int]
    stops: frozenset[int]
    watch: Watch | None
    rows: list[Row]
    taken: list[list[int]]
    future: Future[list[Sample]] = field(default_factory=Future)
    cancelled: threading.Event = field(default_factory=threading.Event)
    trunk: Track | None = None
    first: Tensor | None = None
    waiting: deque[int] = field(default_factory=deque)
    branches: list[Branch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting.extend(index for index, row in enumerate(self.rows) if row.finished is None)

    def pages_needed(self) -> int:
        """Pages that the next sample needs for all it may ever hold, with the prompt's where nothing is taken yet.
        The last token is sampled and never read."""
        positions = len(self.prompt) + self.params.max_new_tokens - 1
        own = pages_for(positions) - len(self.prompt) // PAGE
        return own if self.trunk is not None else own + pages_for(len(self.prompt))

    def take(self, pool: PagePool) -> None:
        """Give the next waiting sample its pages (`pages_needed` of them are free)."""
        if self.trunk is None:
            self.trunk = Track(self.prompt, np.array(pool.take(pages_for(len(self.prompt))), np.int32))
        own = pool.take(self.pages_needed())
        index = self.waiting.popleft()
        shared = self.trunk.pages[: len(self.prompt) // PAGE]
        track = Track([*self.prompt, *self.taken[index]], np.concatenate((shared, np.array(own, np.int32))))
        branch = Branch(index, self.rows[index], self.seeds[index], track, own)
        self.branches.append(branch)
        if self.first is not None:
            self.fork(branch, pool)

    def fork(self, branch: Branch, pool: PagePool) -> None:
        """Let a branch go on from the end of the prompt, which is computed: whole pages are shared, the last one, which
        both would write to, is copied."""
        assert self.trunk is not None
        branch.track.done = len(self.prompt)
        if len(self.prompt) % PAGE:
            whole = len(self.prompt) // PAGE
            pool.copy(int(self.trunk.pages[whole]), branch.own[0])

    def forget(self) -> bool:
        """The weights changed: everything has to be computed again. Says whether anything had been."""
        had = self.trunk is not None and self.trunk.done > 0
        self.first = None
        if self.trunk is not None:
            self.trunk.done = 0
        for branch in self.branches:
            branch.track.done = 0
        return had

    def finish(self, branch: Branch, pool: PagePool) -> None:
        """A sample is complete: its pages are free again."""
        self.branches.remove(branch)
        pool.give(branch.own)

    def release(self, pool: PagePool) -> None:
        """Give back everything. Idempotent."""
        for branch in self.branches:
            pool.give(branch.own)
        if self.trunk is not None:
            pool.give(self.trunk.pages.tolist())
        self.branches, self.trunk, self.first = [], None, None
        self.waiting.clear()

    @property
    def complete(self) -> bool:
        return all(row.finished is not None for row in self.rows)
