"""AdamW and Muon: who steps what, and a resume that continues bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from sprawl.board.ledger import Ledger
from sprawl.board.store import open_store
from sprawl.errors import IntegrityError, SprawlError
from sprawl.train.checkpoint import restore, save_checkpoint
from sprawl.train.optimizer import MuonAdamW, build_optimizer, load_optimizer_tensors, optimizer_tensors
from sprawl.train.trainer import Trainer
from tests.train.helpers import make_batch, make_config, make_decoder

KINDS = ("adamw", "muon")


def make_trainer(kind: str, seed: int = 0, **settings: object) -> Trainer:
    config = make_config(optimizer={"kind": kind, "lr": 1e-3, **settings})
    return Trainer(make_decoder(seed), make_decoder(seed), config)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.decoder.named_parameters()}


def test_muon_owns_the_hidden_matrices_and_adamw_the_rest() -> None:
    trainer = make_trainer("muon")
    trainer.step(1, make_batch(1), None)
    assert isinstance(trainer.optimizer, MuonAdamW)
    keys: dict[str, set[str]] = {}
    for entry in optimizer_tensors(trainer.decoder, trainer.optimizer):
        key, _, name = entry.partition(":")
        keys.setdefault(name, set()).add(key)
    for name, parameter in trainer.decoder.named_parameters():
        hidden = parameter.ndim == 2 and "embed_tokens" not in name
        assert keys[name] == ({"momentum_buffer"} if hidden else {"exp_avg", "exp_avg_sq", "step"}), name
    assert any(keys[name] == {"momentum_buffer"} for name in keys)


def test_a_muon_step_is_the_orthogonalised_gradient_with_the_step_size_of_adamw() -> None:
    """Against the singular value decomposition: the same directions, every one of them moved about equally far."""
    decoder = make_decoder()
    optimizer = build_optimizer(decoder, make_config(optimizer={"kind": "muon", "lr": 1e-3}).optimizer)
    name, parameter = "model.layers.0.mlp.up_proj.weight", decoder.model.layers[0].mlp.up_proj.weight
    before = parameter.detach().clone()
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    u, _, v = torch.linalg.svd(parameter.grad, full_matrices=False)
    step = before - parameter.detach()
    assert torch.cosine_similarity(step.flatten(), (u @ v).flatten(), dim=0) > 0.97, name
    assert step.square().mean().sqrt() == pytest.approx(0.2e-3, rel=0.15)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_optimizer_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    straight = make_trainer(kind, weight_decay=0.1)
    for step in (1, 2, 3, 4):
        straight.step(step, make_batch(step), None)
    killed = make_trainer(kind, weight_decay=0.1)
    for step in (1, 2):
        killed.step(step, make_batch(step), None)
    store = open_store(str(tmp_path / "board"), create=True)
    ledger = Ledger(store, "r")
    save_checkpoint(store, ledger, 2, 1, killed.decoder, killed.optimizer)
    resumed = make_trainer(kind, seed=1, weight_decay=0.1)  # other weights: all of them come from the checkpoint
    restore(store, ledger, 2, resumed.decoder, resumed.optimizer)
    for step in (3, 4):
        resumed.step(step, make_batch(step), None)
    expected = weights(straight)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())
    moments = optimizer_tensors(straight.decoder, straight.optimizer)
    assert moments.keys() == optimizer_tensors(resumed.decoder, resumed.optimizer).keys()
    for name, value in optimizer_tensors(resumed.decoder, resumed.optimizer).items():
        assert torch.equal(value, moments[name]), name


@pytest.mark.parametrize(("kind", "other"), [KINDS, KINDS[::-1]])
def test_state_of_another_optimizer_is_refused(kind: str, other: str) -> None:
    made, reader = make_trainer(kind), make_trainer(other)
    made.step(1, make_batch(1), None)
    tensors = load(save(optimizer_tensors(made.decoder, made.optimizer)))
    with pytest.raises(IntegrityError, match=r"made by another optimizer \(resume with the run's optimizer.kind\)"):
        load_optimizer_tensors(reader.decoder, reader.optimizer, tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_incomplete_and_foreign_state_is_refused(kind: str) -> None:
    trainer = make_trainer(kind)
    trainer.step(1, make_batch(1), None)
    tensors = optimizer_tensors(trainer.decoder, trainer.optimizer)
    kept = {name: t for name, t in tensors.items() if name != "exp_avg_sq:model.norm.weight"}
    with pytest.raises(IntegrityError, match=r"'exp_avg_sq:model\.norm\.weight' is missing"):
        load_optimizer_tensors(trainer.decoder, trainer.optimizer, kept)
    with pytest.raises(IntegrityError, match="'step:nowhere' belongs to no parameter"):
        load_optimizer_tensors(trainer.decoder, trainer.optimizer, {**tensors, "step:nowhere": torch.ones(1)})


def test_muon_without_hidden_matrices_is_refused() -> None:
    settings = make_config(optimizer={"kind": "muon"}).optimizer
    with pytest.raises(SprawlError, match="needs hidden matrices"):
        build_optimizer(torch.nn.LayerNorm(4), settings)
