"""A step's trajectories as tensors, and as the safetensors object that the board keeps.

The object is written once, before the step trains on it, so that a resumed run and the anchor replay exactly what
the trainer saw. A single-turn sample and a multi-turn episode are both one row: what the policy read first, then
everything that followed, with a mask over the tokens that the policy sampled itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sprawl.board import keys
from sprawl.board.store import Store
from sprawl.errors import IntegrityError
from sprawl.rollout.feed import FeedState

FORMAT = "sprawl-rollouts-2"
OLD_FORMAT = "sprawl-rollouts-1"  # read, no longer written: without masks, spans, finish reasons, turns and experts
FINISH = ("unknown", "stop", "length")
"""What the codes of `RolloutBatch.finish` mean."""


@dataclass(frozen=True)
class Span:
    """Response tokens [start, end) were sampled by `version`, on `island`."""

    version: int
    start: int
    end: int
    island: str


@dataclass(frozen=True)
class Trajectory:
    """One row before padding. `logprobs` and `mask` are as long as `response`; a token whose mask is False was not
    sampled by the policy (a tool wrote it) and has log-prob 0. `spans` cover exactly the masked-in tokens.

    `experts`: routed experts, integers [positions, layers, k], where the engine gave them.
    """

    prompt: Sequence[int]
    response: Sequence[int]
    logprobs: Sequence[float]
    mask: Sequence[bool]
    spans: Sequence[Span]
    reward: float
    group: int
    seed: int
    finish: Literal["unknown", "stop", "length"] = "unknown"
    turns: int = 1
    experts: Tensor | None = None


@dataclass(frozen=True)
class Sampled:
    """Groups and mean verifier score of everything sampled for a step."""

    groups: int
    reward: float


@dataclass(frozen=True)
class RolloutBatch:
    """N samples, rows of a group adjacent.

    tokens: [N, L] int32, prompt then response, right-padded with 0. prompt_lengths, response_lengths: [N] int32.
    logprobs: [N, R] fp32, the sampler's log-probs of the response tokens in nats, right-padded with 0.
    rewards: [N] fp32. groups: [N] int32, problem index. seeds: [N] int64.
    version_start, version_end: [N] int32, versions that sampled the first and the last token.
    islands: which island answered each group last, in order of appearance.
    draws: what was sampled for this step, groups left out by dynamic sampling included; None where none were.
    feed: where the stream stood that the batch was taken from; None where rollouts are sampled step by step.

    loss_mask: [N, R] bool, True where the policy sampled the token; None: all of the response.
    spans: [S, 5] int32, (row, start, end, version, island), response positions, in row order; island is an index into
    island_names. None where the object is older than spans.
    finish: [N] uint8, index into FINISH. turns: [N] int32, turns of the policy.
    experts: integers [E, layers, k], the rows' routed experts one after another; expert_lengths: [N] int32, sums to E.
    """

    step: int
    tokens: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    logprobs: Tensor
    rewards: Tensor
    groups: Tensor
    seeds: Tensor
    version_start: Tensor
    version_end: Tensor
    islands: tuple[str, ...]
    loss_mask: Tensor | None = None
    spans: Tensor | None = None
    finish: Tensor | None = None
    turns: Tensor | None = None
    experts: Tensor | None = None
    expert_lengths: Tensor | None = None
    island_names: tuple[str, ...] = ()
    draws: Sampled | None = None
    feed: FeedState | None = None

    @property
    def samples(self) -> int:
        return self.tokens.shape[0]

    @property
    def truncated(self) -> Tensor | None:
        """[N] bool: the response ended at the token limit; None where the object does not say it."""
        return None if self.finish is None else self.finish == FINISH.index("length")

    @property
    def sampled(self) -> Tensor:
        """[N, R] bool: response tokens that the policy sampled, which are those that are trained on."""
        present = torch.arange(self.logprobs.shape[1])[None, :] < self.response_lengths[:, None]
        return present if self.loss_mask is None else present & self.loss_mask

    @property
    def sampled_lengths(self) -> Tensor:
        """[N] int32: sampled tokens of every row."""
        return self.response_lengths if self.loss_mask is None else self.sampled.sum(1, dtype=torch.int32)

    @property
    def response_tokens(self) -> int:
        """Tokens that the policy sampled, the whole batch."""
        return int(self.sampled_lengths.sum())

    @property
    def oldest_versions(self) -> Tensor:
        """[G] int32: the lowest version that sampled a token of each group, in order of appearance."""
        oldest = self.version_start.clone()
        if self.spans is not None:  # a continuation elsewhere may go back to an older version than it began with
            oldest.scatter_reduce_(0, self.spans[:, 0].long(), self.spans[:, 3], "amin")
        _, place, counts = torch.unique_consecutive(self.groups, return_inverse=True, return_counts=True)
        return oldest.new_zeros(len(counts)).scatter_reduce(0, place, oldest, "amin", include_self=False)

    def flat_logprobs(self, rows: Tensor) -> Tensor:
        """Sampler log-probs of the sampled tokens of `rows`, in sample order, [m]."""
        return self.logprobs[rows][self.sampled[rows]]

    def spans_of(self, row: int) -> list[Span] | None:
        """Which version made which tokens of a row, and where; None when that was not recorded."""
        if self.spans is None:
            return None
        found = self.spans[self.spans[:, 0] == row]
        if not len(found):
            return None
        names = self.island_names
        return [Span(version, start, end, names[island]) for _, start, end, version, island in found.tolist()]


def expert_tensor(routed: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Expert ids [positions][layers][k] as the smallest integers that hold them, uint8 or int16."""
    tensor = torch.tensor(routed, dtype=torch.int16)
    return tensor.to(torch.uint8) if not tensor.numel() or int(tensor.max()) < 256 else tensor


def batch_of(step: int, rows: Sequence[Trajectory], islands: Sequence[str]) -> RolloutBatch:
    """Rows as padded tensors. `islands`: see `RolloutBatch.islands`. Raises ValueError without rows, or for a row
    whose parts do not fit together."""
    if not rows:
        raise ValueError("a batch needs at least one trajectory")
    for number, row in enumerate(rows):
        _check(number, row)
    width = max(len(row.prompt) + len(row.response) for row in rows)
    longest = max(len(row.response) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.int32)
    logprobs = torch.zeros(len(rows), longest)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids = [*row.prompt, *row.response]
        tokens[number, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        logprobs[number, : len(row.logprobs)] = torch.tensor(row.logprobs)
        mask[number, : len(row.mask)] = torch.tensor(row.mask)
    names = tuple(sorted({span.island for row in rows for span in row.spans}))
    spans = [
        (number, span.start, span.end, span.version, names.index(span.island))
        for number, row in enumerate(rows)
        for span in row.spans
    ]
    given = [row.experts for row in rows if row.experts is not None]
    if len({expert.dtype for expert in given}) > 1:
        given = [expert.to(torch.int16) for expert in given]

    def column(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    return RolloutBatch(
        step=step,
        tokens=tokens,
        prompt_lengths=column([len(row.prompt) for row in rows]),
        response_lengths=column([len(row.response) for row in rows]),
        logprobs=logprobs,
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float32),
        groups=column([row.group for row in rows]),
        seeds=column([row.seed for row in rows], torch.int64),
        version_start=column([row.spans[0].version for row in rows]),
        version_end=column([row.spans[-1].version for row in rows]),
        islands=tuple(islands),
        loss_mask=None if all(all(row.mask) for row in rows) else mask,
        spans=torch.tensor(spans, dtype=torch.int32).reshape(-1, 5),
        finish=column([FINISH.index(row.finish) for row in rows], torch.uint8),
        turns=column([row.turns for row in rows]),
        experts=torch.cat(given) if given else None,
        expert_lengths=column([0 if row.experts is None else len(row.experts) for row in rows]) if given else None,
        island_names=names,
    )


def _check(number: int, row: Trajectory) -> None:
    covered = [position for span in row.spans for position in range(span.start, span.end)]
    if not len(row.response) == len(row.logprobs) == len(row.mask):
        raise ValueError(f"trajectory {number}: tokens, log-probs and mask differ in length")
    if not covered or covered != [position for position, sampled in enumerate(row.mask) if sampled]:
        raise ValueError(f"trajectory {number}: its version spans do not cover exactly the sampled tokens")


def load_batch(store: Store, run_id: str, step: int) -> RolloutBatch:
    """The stored batch of a step. Raises MissingKey while there is none and IntegrityError when it is damaged."""
    key = keys.rollouts(run_id, step)
    return from_bytes(store.get(key), key)


REQUIRED = (
    "tokens",
    "prompt_lengths",
    "response_lengths",
    "logprobs",
    "rewards",
    "groups",
    "seeds",
    "version_start",
    "version_end",
)
OPTIONAL = ("loss_mask", "spans", "finish", "turns", "experts", "expert_lengths")


def to_bytes(batch: RolloutBatch) -> bytes:
    """Serialise; the same batch gives the same bytes."""
    # One metadata entry: safetensors writes several in random order.
    metadata: dict[str, object] = {
        "format": FORMAT,
        "step": batch.step,
        "islands": batch.islands,
        "island_names": batch.island_names,
    }
    if batch.draws is not None:
        metadata["draws"] = asdict(batch.draws)
    if batch.feed is not None:
        metadata["feed"] = asdict(batch.feed)
    tensors = {name: getattr(batch, name) for name in REQUIRED + OPTIONAL}
    return save(
        {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None},
        {"rollouts": json.dumps(metadata)},
    )


def from_bytes(data: bytes, source: str) -> RolloutBatch:
    """Parse. Raises IntegrityError naming `source` when the object is damaged or of another format."""
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = json.loads(header["__metadata__"]["rollouts"])
        if metadata["format"] not in (FORMAT, OLD_FORMAT):
            known = f"this release reads {OLD_FORMAT!r} and {FORMAT!r}"
            raise IntegrityError(f"{source}: rollouts of format {metadata['format']!r}, {known}")
        parts: dict[str, Any] = {name: tensors[name] for name in REQUIRED}
        if metadata["format"] == FORMAT:
            parts |= {name: tensors.get(name) for name in OPTIONAL}
            parts["island_names"] = tuple(metadata["island_names"])
            parts["draws"] = Sampled(**metadata["draws"]) if "draws" in metadata else None
            parts["feed"] = FeedState.parse(metadata["feed"]) if "feed" in metadata else None
        batch = RolloutBatch(step=metadata["step"], islands=tuple(metadata["islands"]), **parts)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"{source}: damaged rollouts: {error}") from error
    _check_shapes(batch, source)
    return batch


def _check_shapes(batch: RolloutBatch, source: str) -> None:
    """A file can be intact as safetensors and still not be a batch."""
    for field in fields(RolloutBatch):
        tensor = getattr(batch, field.name)
        if not isinstance(tensor, Tensor) or field.name in ("spans", "experts"):
            continue
        dims = 2 if field.name in ("tokens", "logprobs", "loss_mask") else 1
        if tensor.dim() != dims or tensor.shape[0] != batch.samples:
            raise IntegrityError(f"{source}: damaged rollouts: {field.name} has shape {list(tensor.shape)}")
    if batch.spans is not None and (batch.spans.dim() != 2 or batch.spans.shape[1] != 5):
        raise IntegrityError(f"{source}: damaged rollouts: spans has shape {list(batch.spans.shape)}")
