"""Slices of the decoder, each a module of its own, against the whole and against transformers."""

from __future__ import annotations

import pytest
import torch

from sprawl.errors import ConfigError, IntegrityError
from sprawl.policy import Architecture, Decoder
from sprawl.policy.stage import TIED, StagePlace, load_stage, owned_names, parameter_names, stage_decoder
from tests.policy.test_parity import FAMILIES, decoder_of, reference, tokens


def places(arch: Architecture, stages: int) -> list[StagePlace]:
    return [StagePlace(index, stages, layers) for index, layers in enumerate(arch.split(stages))]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_stages_one_after_another_are_transformers_to_the_bit(family: str, tied: bool) -> None:
    model = reference(family, num_hidden_layers=5, tie_word_embeddings=tied)
    whole, input_ids = decoder_of(model), tokens(2, 9)
    weights = dict(whole.named_parameters())
    x = torch.empty(0)
    for place in places(whole.arch, 3):
        stage = stage_decoder(whole.arch, place)
        load_stage(stage, weights, torch.float32)
        x = stage.embed(input_ids) if place.first else x
        x = stage.run_layers(x, place.layers, stage.rotary(0, 9, x.dtype))
    assert torch.equal(stage.head(x), model(input_ids).logits)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_parameter_has_one_owner(tied: bool) -> None:
    arch = decoder_of(reference("Qwen2", num_hidden_layers=5, tie_word_embeddings=tied)).arch
    stages = [(place, stage_decoder(arch, place)) for place in places(arch, 3)]
    owned = [name for place, stage in stages for name in owned_names(stage, place)]
    assert sorted(owned) == sorted(parameter_names(arch))
    assert parameter_names(arch) == [name for name, _ in Decoder(arch).named_parameters()]
    held = [TIED in dict(stage.named_parameters()) for _, stage in stages]
    assert held == [True, False, tied]


def test_a_stage_without_its_tensors_is_refused() -> None:
    arch = decoder_of(reference("Qwen2")).arch
    stage = stage_decoder(arch, places(arch, 3)[1])
    with pytest.raises(IntegrityError, match="missing"):
        load_stage(stage, {}, torch.float32)


def test_the_default_split_is_the_reports() -> None:
    arch = Architecture.from_hf({**reference("Qwen2").config.to_dict(), "num_hidden_layers": 28})
    assert [len(layers) for layers in arch.split(8)] == [4, 4, 4, 4, 3, 3, 3, 3]
    assert [layer for layers in arch.split(8) for layer in layers] == list(range(28))
    with pytest.raises(ConfigError, match="only 28 layers"):
        arch.split(29)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_give_the_same_gradient(family: str) -> None:
    gradients = []
    for recompute in (False, True):
        decoder, input_ids = decoder_of(reference(family)), tokens(2, 9)
        x = decoder.embed(input_ids)
        x = decoder.run_layers(x, range(3), decoder.rotary(0, 9, x.dtype), recompute=recompute)
        decoder.head(x).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in decoder.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))  # type: ignore[arg-type]
