"""Which rows go through the stages together: the optimizer updates of an epoch and their microbatches. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sprawl.config import GrpoConfig
from sprawl.errors import SprawlError
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.train.pipeline import Packed, pack_rows


@dataclass(frozen=True)
class Microbatch:
    """Rows of a batch ([b] int64), packed, and the trainer's log-probs [m] before the step where they are needed."""

    rows: Tensor
    packed: Packed
    old: Tensor | None = None


def plan_updates(batch: RolloutBatch, config: GrpoConfig) -> list[list[Microbatch]]:
    """The updates of an epoch: whole groups each, their numbers at most one apart, cut into microbatches.

    Raises SprawlError naming the sample and its problem when one alone is more than `microbatch_tokens`.
    """
    _, sizes = torch.unique_consecutive(batch.groups, return_counts=True)
    shares = sizes.tensor_split(min(len(sizes), config.minibatches))
    parts = torch.arange(batch.samples).split([int(share.sum()) for share in shares])
    return [cut(batch, part, config) for part in parts]


def cut(batch: RolloutBatch, rows: Tensor, config: GrpoConfig) -> list[Microbatch]:
    """`rows` as microbatches: `microbatch_rows` each, or by a token budget (see `fill`)."""
    if config.microbatch_tokens is None:
        parts: Sequence[Tensor] = rows.split(config.microbatch_rows)
    else:
        lengths = (batch.prompt_lengths + batch.response_lengths)[rows].tolist()
        check_lengths(batch, rows, lengths, config.microbatch_tokens, "grpo.microbatch_tokens")
        parts = [rows[chosen] for chosen in fill(lengths, config.microbatch_tokens)]
    return [Microbatch(part, pack_rows(batch, part)) for part in parts]


def fill(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Positions of `lengths`, longest first, as runs of neighbours of at most `budget` tokens together.

    Neighbours are of like length, so that little of a padded [rows, longest] matrix is padding. The number of runs is
    what going through them once needs; then the runs are made as even as it allows, so that little of a payload of
    fixed size is padding either.
    """
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    runs = _runs(order, lengths, budget)
    # The smallest size that gives no more runs: a search between an even share and the budget.
    low, high = max(-(-sum(lengths) // max(1, len(runs))), max(lengths, default=0)), budget
    while low < high:
        middle = (low + high) // 2
        if len(_runs(order, lengths, middle)) <= len(runs):
            high = middle
        else:
            low = middle + 1
    return _runs(order, lengths, high) if lengths else []


def _runs(order: Sequence[int], lengths: Sequence[int], size: int) -> list[list[int]]:
    runs: list[list[int]] = []
    room = 0
    for place in order:
        if lengths[place] > room or not runs:
            runs.append([])
            room = size
        runs[-1].append(place)
        room -= lengths[place]
    return runs


def check_lengths(batch: RolloutBatch, rows: Tensor, lengths: Sequence[int], limit: int, what: str) -> None:
    """Raises SprawlError naming the longest sample when it has more than `limit` tokens."""
    longest = max(range(len(lengths)), key=lambda place: lengths[place])
    if lengths[longest] <= limit:
        return
    row = int(rows[longest])
    raise SprawlError(
        f"step {batch.step}: sample {row} (problem {int(batch.groups[row])}) has {lengths[longest]} tokens, "
        f"{int(batch.prompt_lengths[row])} of them its prompt; {what} is {limit}",
        f"raise {what}, lower rollout.max_new_tokens, or leave that problem out",
    )


def check_shares(microbatches: int, replicas: int) -> None:
    """Raises SprawlError when a replica would have nothing to do in an update."""
    if microbatches < replicas:
        raise SprawlError(
            f"policy.replicas={replicas} but an update has {microbatches} microbatches",
            "lower grpo.microbatch_rows (or microbatch_tokens), or use fewer replicas",
        )
