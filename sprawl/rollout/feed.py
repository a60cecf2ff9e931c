"""Where a stream of groups stands when a batch is taken from it: kept with the batch, so that whoever resumes the run
goes on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class FeedState:
    """prompts: number of the prompt of each group of the batch, in order. next_prompt: every number below it was asked
    for at least once. under_way: of those the ones that are neither trained nor given up, ascending; a resumed run asks
    for them again.

    discarded: groups given up since the batch before because a token of theirs was too old. failed: requests that
    ended without a group since then (each is repeated). in_flight, ready: groups being sampled, and groups finished and
    left for later batches, when this one was taken. queue_seconds, queue_seconds_max: how long the groups of the batch
    had been finished by then, mean and longest.
    """

    prompts: tuple[int, ...]
    next_prompt: int
    under_way: tuple[int, ...]
    discarded: int = 0
    failed: int = 0
    in_flight: int = 0
    ready: int = 0
    queue_seconds: float = 0.0
    queue_seconds_max: float = 0.0

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> FeedState:
        """From what JSON made of it; unknown members are ignored. Raises KeyError, TypeError or ValueError for anything
        else."""
        numbers = {name: tuple(int(number) for number in data[name]) for name in ("prompts", "under_way")}
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known} | numbers)
