"""subspace: a projector, its adjoint, and the power iteration that turns it towards the activations."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save

from sprawl.anchor.replay import replay
from sprawl.anchor.service import read_bases
from sprawl.board import keys
from sprawl.board.store import MemoryStore
from sprawl.errors import IntegrityError
from sprawl.train.codecs import BasisObserver, SubspaceCodec, WireCounter, cross
from sprawl.train.codecs.subspace import initial_basis
from sprawl.train.trainer import Trainer
from tests.report.plausible import make_fire
from tests.train.codecs.support import through, token_ids
from tests.train.helpers import make_batch, make_config, make_decoder


def orthonormal(basis: torch.Tensor) -> bool:
    return torch.allclose(basis.T @ basis, torch.eye(basis.shape[1], dtype=basis.dtype), atol=1e-5)


def test_initial_basis_is_k_coordinates_from_the_prf() -> None:
    basis = initial_basis(7, 3, 1536, 77)
    assert torch.equal(basis.T @ basis, torch.eye(77))
    assert set(basis.flatten().tolist()) == {0.0, 1.0}
    assert not torch.equal(basis, initial_basis(7, 4, 1536, 77))
    assert torch.equal(basis, initial_basis(7, 3, 1536, 77))


def test_k_coefficients_cross_and_the_estimate_is_the_projection() -> None:
    codec, wire = SubspaceCodec(3, 0.25), WireCounter()
    basis = torch.linalg.qr(torch.randn(32, 8, generator=torch.Generator().manual_seed(0))).Q
    codec.use({0: basis})
    x = torch.randn(2, 5, 32, requires_grad=True)
    y = cross(x, codec, 0, 1, token_ids(10), wire)
    assert torch.allclose(y, x @ basis @ basis.T, atol=1e-5)
    y.sum().backward()
    assert wire.sent == 2 * 10 * 8 * 4
    assert torch.allclose(through(codec, y.detach().view(10, 32), 2), y.detach().view(10, 32), atol=1e-5)  # a projector


def test_backward_is_the_adjoint_of_forward() -> None:
    codec = SubspaceCodec(3, 0.25)
    codec.use({0: torch.linalg.qr(torch.randn(32, 8, dtype=torch.float64)).Q})
    x = torch.randn(10, 32, dtype=torch.float64, requires_grad=True)
    weight, other = torch.randn(10, 32, dtype=torch.float64), torch.randn(10, 32, dtype=torch.float64)
    through(codec, x, 1).backward(weight)
    assert x.grad is not None
    assert torch.allclose((through(codec, other, 1) * weight).sum(), (other * x.grad).sum())


def test_power_iteration_finds_the_subspace_of_the_activations() -> None:
    """Activations of rank 4 plus a little noise: after a few refreshes 8 coefficients carry nearly everything."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 4, generator=generator) @ torch.randn(4, 32, generator=generator)
    x += 0.01 * torch.randn(200, 32, generator=generator)
    codec, errors = SubspaceCodec(3, 0.25), []
    for _ in range(4):
        errors.append(float((through(codec, x, 1) - x).square().sum() / x.square().sum()))
        observer = BasisObserver(codec)
        for part in x.split(70):
            assert torch.equal(through(observer, part, 0), part)
        codec.use(observer.refreshed())
        assert orthonormal(codec.bases[0])
    assert errors[0] > 0.5
    assert errors[-1] < 1e-3


def test_one_refresh_is_the_formula() -> None:
    x, codec = torch.randn(50, 32), SubspaceCodec(3, 0.25)
    observer = BasisObserver(codec)
    through(observer, x, 0)
    before = initial_basis(3, 0, 32, 8)
    expected = torch.linalg.qr((x.T @ (x @ before)).double()).Q.float()
    assert torch.allclose(observer.refreshed()[0], expected, atol=1e-4)


def test_activations_that_are_not_finite_leave_the_basis_alone() -> None:
    codec = SubspaceCodec(3, 0.25)
    observer = BasisObserver(codec)
    through(observer, torch.full((5, 32), float("nan")), 0)
    assert torch.equal(observer.refreshed()[0], initial_basis(3, 0, 32, 8))


def test_the_anchor_fits_a_basis_a_boundary_without_changing_its_gradient() -> None:
    config = make_config(boundary={"codec": "subspace", "ratio": 0.25})
    plain = replay(make_decoder(), make_batch(), config)
    observer = BasisObserver(SubspaceCodec(config.seed, 0.25))
    watched = replay(make_decoder(), make_batch(), config, observer)
    assert all(torch.equal(plain.gradients[name], value) for name, value in watched.gradients.items())
    bases = observer.refreshed()
    assert sorted(bases) == [0, 1, 2]
    assert all(basis.shape == (32, 8) and orthonormal(basis) for basis in bases.values())
    trainer = Trainer(make_decoder(), make_decoder(), config)
    before = trainer.step(1, make_batch(), None).mismatch
    fresh = Trainer(make_decoder(), make_decoder(), config)
    fresh.use_bases(bases)
    assert fresh.step(1, make_batch(), None).mismatch != before


def test_a_basis_of_another_width_is_refused() -> None:
    with pytest.raises(IntegrityError, match=r"basis of boundary 2 has shape \(32, 5\)"):
        SubspaceCodec(3, 0.25).use({2: torch.zeros(32, 5)})


def test_bases_of_a_fire_are_read_back_and_damage_is_found() -> None:
    store, bases = MemoryStore(), {0: initial_basis(1, 0, 32, 8), 2: initial_basis(1, 2, 32, 8)}
    data = save({str(layer): basis for layer, basis in bases.items()})
    fire = make_fire(40, basis_digest=blake3(data).hexdigest(), basis_bytes=len(data))
    store.put(keys.bases("r", 40, fire.basis_digest or ""), data)
    again = read_bases(store, "r", fire)
    assert again is not None
    assert sorted(again) == [0, 2]
    assert all(torch.equal(again[layer], basis) for layer, basis in bases.items())
    assert read_bases(store, "r", make_fire(40)) is None
    store.put(keys.bases("r", 40, fire.basis_digest or ""), data[:-1] + b"x")
    with pytest.raises(IntegrityError, match="bases of fire 40: their bytes are not the committed ones"):
        read_bases(store, "r", fire)
