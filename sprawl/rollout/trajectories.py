"""A step's trajectories as tensors, and as the safetensors object that the board keeps.

The object is written once, before the step trains on it, so that a resumed run and the anchor replay exactly what
the trainer saw.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sprawl.board import keys
from sprawl.board.store import Store
from sprawl.errors import IntegrityError

FORMAT = "sprawl-rollouts-1"


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
    islands: which island answered each group, in order of appearance.
    truncated: [N] bool, the response ended at the token limit; None in batches of earlier releases.
    sampled: what was sampled for this step, groups left out by dynamic sampling included; None where none were.
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
    truncated: Tensor | None = None
    sampled: Sampled | None = None

    @property
    def samples(self) -> int:
        return self.tokens.shape[0]

    @property
    def response_tokens(self) -> int:
        return int(self.response_lengths.sum())

    def flat_logprobs(self, rows: Tensor) -> Tensor:
        """Sampler log-probs of the response tokens of `rows`, in sample order, [m]."""
        width = self.logprobs.shape[1]
        present = torch.arange(width)[None, :] < self.response_lengths[rows, None]
        return self.logprobs[rows][present]


def load_batch(store: Store, run_id: str, step: int) -> RolloutBatch:
    """The stored batch of a step. Raises MissingKey while there is none and IntegrityError when it is damaged."""
    key = keys.rollouts(run_id, step)
    return from_bytes(store.get(key), key)


TENSORS = (
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


def to_bytes(batch: RolloutBatch) -> bytes:
    """Serialise; the same batch gives the same bytes."""
    # One metadata entry: safetensors writes several in random order.
    metadata: dict[str, object] = {"format": FORMAT, "step": batch.step, "islands": batch.islands}
    if batch.sampled is not None:
        metadata["sampled"] = asdict(batch.sampled)
    tensors = {name: getattr(batch, name).contiguous() for name in TENSORS}
    if batch.truncated is not None:
        tensors["truncated"] = batch.truncated.contiguous()
    return save(tensors, {"rollouts": json.dumps(metadata)})


def from_bytes(data: bytes, source: str) -> RolloutBatch:
    """Parse. Raises IntegrityError naming `source` when the object is damaged or of another format."""
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = json.loads(header["__metadata__"]["rollouts"])
        if metadata["format"] != FORMAT:
            raise IntegrityError(f"{source}: rollouts of format {metadata['format']!r}, this release reads {FORMAT!r}")
        return RolloutBatch(
            step=metadata["step"],
            islands=tuple(metadata["islands"]),
            truncated=tensors.get("truncated"),
            sampled=Sampled(**metadata["sampled"]) if "sampled" in metadata else None,
            **{name: tensors[name] for name in TENSORS},
        )
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"{source}: damaged rollouts: {error}") from error
