"""Which samples count and which groups are worth training on: overlong responses, dynamic sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


def overlong_penalty(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """DAPO's soft punishment (arXiv:2503.14476, equation 13), to be added to the reward: lengths [N] int -> [N] fp32.

    0 up to limit - buffer tokens, then falling linearly to -1 at `limit` and beyond.
    """
    return -((lengths - (limit - buffer)).float() / buffer).clamp(0, 1)


@dataclass(frozen=True)
class Refill:
    """What dynamic sampling does after a round (DAPO, section 3.2).

    keep: positions among the groups sampled so far that make the batch, in the order they were sampled; complete only
    when `missing` is 0. missing: prompts to sample in another round, 0 when none shall be. dropped: groups sampled and
    not in `keep`.
    """

    keep: list[int]
    missing: int
    dropped: int


def plan_refill(informative: Sequence[bool], wanted: int, rounds_left: int) -> Refill:
    """Choose the batch of `wanted` groups out of all sampled so far; `informative[i]`: group i's samples scored
    differently.

    Groups with an advantage come first. When they are too few and a round is left, as many prompts are asked for as
    groups are missing; when none is left, groups without an advantage fill up, so that a batch always has its size.
    """
    useful = [i for i, value in enumerate(informative) if value][:wanted]
    missing = wanted - len(useful)
    if missing and rounds_left > 0:
        return Refill(useful, missing, 0)
    useless = [i for i, value in enumerate(informative) if not value][:missing]
    keep = sorted(useful + useless)
    return Refill(keep, 0, len(informative) - len(keep))
