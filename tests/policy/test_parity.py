"""The decoder against transformers: same weights, same logits, bit for bit in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sprawl.errors import ConfigError
from sprawl.policy import Architecture, Decoder
from sprawl.policy.checkpoint import drop_tied_head

transformers = pytest.importorskip("transformers")

VOCAB = 61
FAMILIES = ("Qwen2", "Qwen3", "Llama")


def reference(family: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny transformers model with random weights, biases and norms (fp32, sdpa attention, eval mode)."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
        **changes,
    }
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norm weights away from 1 and biases away from 0: a parameter that is not used must show.
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def decoder_of(model: Any) -> Decoder:
    arch = Architecture.from_hf(model.config.to_dict())
    decoder = Decoder(arch)
    decoder.load_served(drop_tied_head(model.state_dict(), arch), torch.float32)
    return decoder


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def both(model: Any, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return decoder_of(model)(input_ids), model(input_ids).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_logits_are_bit_equal(family: str, kv_heads: int, tied: bool) -> None:
    model = reference(family, num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    ours, theirs = both(model, tokens(3, 17))
    assert ours.dtype == torch.float32
    assert ours.std() > 0.1
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen3", {"head_dim": 20}),  # not hidden_size / heads
        ("Llama", {"head_dim": 8}),
        ("Llama", {"attention_bias": True}),
        ("Llama", {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}),
        ("Qwen2", {"num_hidden_layers": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    ],
    ids=str,
)
def test_switches_of_the_configuration_are_followed(family: str, changes: dict[str, Any]) -> None:
    ours, theirs = both(reference(family, **changes), tokens(2, 33))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (5, 1), (1, 64)])
def test_edge_shapes_are_bit_equal(shape: tuple[int, int]) -> None:
    ours, theirs = both(reference("Qwen2"), tokens(*shape))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_transformers(family: str) -> None:
    model = reference(family, tie_word_embeddings=True)
    decoder, input_ids = decoder_of(model), tokens(2, 12)
    for logits in (decoder(input_ids), model(input_ids).logits):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()).backward()
    theirs = dict(model.named_parameters())
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        assert theirs[name].grad is not None
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_right_padding_does_not_reach_real_tokens() -> None:
    decoder, input_ids = decoder_of(reference("Qwen2")), tokens(2, 10)
    padded = torch.cat((input_ids, tokens(2, 7, seed=3)), dim=1)
    torch.testing.assert_close(decoder(padded)[:, :10], decoder(input_ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_bfloat16_logits_are_bit_equal_too(family: str) -> None:
    model = reference(family)
    decoder = Decoder(Architecture.from_hf(model.config.to_dict()))
    decoder.load_served(model.state_dict(), torch.bfloat16)
    for parameter in model.parameters():  # not model.to(): that would round the rotary frequencies as well
        parameter.data = parameter.data.to(torch.bfloat16)
    input_ids = tokens(2, 11)
    ours = decoder(input_ids)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, model(input_ids).logits.float())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_layers_run_in_slices_are_the_whole(family: str) -> None:
    model = reference(family, num_hidden_layers=4)
    decoder, input_ids = decoder_of(model), tokens(2, 8)
    x = decoder.embed(input_ids)
    rotary = decoder.rotary(0, 8, x.dtype)
    for layers in decoder.arch.split(3):
        x = decoder.run_layers(x, layers, rotary)
    assert torch.equal(decoder.head(x), model(input_ids).logits)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"use_sliding_window": True},
    ],
    ids=str,
)
def test_what_the_decoder_would_get_wrong_is_refused(changes: dict[str, Any]) -> None:
    config = {**reference("Qwen2").config.to_dict(), **changes}
    with pytest.raises(ConfigError, match="not supported"):
        Architecture.from_hf(config)
