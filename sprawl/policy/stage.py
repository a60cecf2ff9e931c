"""A slice of the decoder as a module of its own: what one process of a pipeline holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sprawl.policy.architecture import Architecture
from sprawl.policy.decoder import Decoder


@dataclass(frozen=True)
class StagePlace:
    """Which slice: stage `index` of `count`, with these layers."""

    index: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


def parameter_names(arch: Architecture) -> list[str]:
    """Names of the whole model's parameters, in its own order; allocates nothing."""
    with torch.device("meta"):
        return [name for name, _ in Decoder(arch).named_parameters()]


def stage_decoder(arch: Architecture, place: StagePlace) -> Decoder:
    """A decoder that has its slice's parameters only, under the checkpoint's names; values are uninitialised.

    The first stage has the embedding, the last one norm and head; with tied embeddings the last one has a copy of the
    embedding. What is missing fails when it is called.
    """
    with torch.device("meta"):
        decoder = Decoder(arch)
    for index in range(arch.layers):
        if index not in place.layers:
            decoder.model.layers[index] = nn.Identity()
    if not place.first and not (place.last and arch.tied):
        del decoder.model.embed_tokens
    if not place.last:
        del decoder.model.norm
        if not arch.tied:
            del decoder.lm_head
    return decoder.to_empty(device="cpu")


def owned_names(decoder: Decoder, place: StagePlace) -> list[str]:
    """The stage's parameters without its copy of a tied embedding, which belongs to the first stage."""
    names = [name for name, _ in decoder.named_parameters()]
    return [name for name in names if place.first or name != TIED]


TIED = "model.embed_tokens.weight"
"""The parameter that the first and the last stage both hold when embeddings are tied."""


def load_stage(decoder: Decoder, state: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Fill a stage from the whole model's weights, or from any part of them that has what it needs.

    Raises IntegrityError as `Decoder.load_served` does.
    """
    names = {name for name, _ in decoder.named_parameters()}
    decoder.load_served({name: tensor for name, tensor in state.items() if name in names}, dtype)
