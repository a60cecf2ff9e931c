"""The base model of a run, as every process of its trainer loads it."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sprawl.config import RunConfig
from sprawl.delta.state import State, served_view
from sprawl.delta.views import dense_view
from sprawl.policy import Architecture
from sprawl.policy.checkpoint import drop_tied_head, load_auxiliary, load_weights, read_architecture
from sprawl.policy.fetch import ensure_base

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseModel:
    """files: config.json, tokenizer ... weights: the checkpoint's tensors, without a tied head."""

    arch: Architecture
    files: dict[str, bytes]
    weights: dict[str, Tensor]

    @classmethod
    def load(cls, config: RunConfig) -> BaseModel:
        """Raises ConfigError when there is none, or it cannot be fetched or converted."""
        directory = ensure_base(config.policy.base, Path("models"), log.info)
        files = load_auxiliary(directory)
        arch = read_architecture(files)
        return cls(arch, files, drop_tied_head(load_weights(directory), arch))

    def part(self, names: Collection[str]) -> BaseModel:
        """The same with these tensors only."""
        return BaseModel(self.arch, self.files, {n: tensor for n, tensor in self.weights.items() if n in names})

    def served(self, format: str) -> State:
        return served_view(self.weights, format)

    def reference(self, config: RunConfig) -> dict[str, Tensor]:
        """Version 0 as it is served, which the policy is kept near to, in the compute dtype."""
        return dense_view(self.served(config.publish.dtype), getattr(torch, config.policy.compute_dtype))
