"""`subspace`: coefficients in a learned orthonormal basis (status report, section 3, the baseline that collapses).

    y = x Q,  x_hat = y Q^T,  Q <- orth(X^T (X Q)) once a fire, frozen in between

The anchor owns the learning: during a dense replay `BasisObserver` sees the activations of every boundary, and its
refreshed bases are broadcast next to the sign map. Before the first fire Q is k coordinates that both ends draw from
the PRF: exactly orthonormal, and the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sprawl.errors import IntegrityError
from sprawl.train import prf
from sprawl.train.codecs.base import BoundaryCodec, TokenIds
from sprawl.train.codecs.dense import DenseCodec
from sprawl.train.codecs.masked import kept_numbers

Bases = Mapping[int, Tensor]
"""Boundary -> Q, [H, k] fp32 with orthonormal columns."""

_BEFORE_ANY_STEP = -1


def initial_basis(seed: int, layer: int, hidden: int, keep: int) -> Tensor:
    """k unit vectors, the coordinates drawn by the PRF: [H, k] fp32."""
    zero = torch.zeros(1, dtype=torch.int64)
    kept = prf.channels(prf.derive_key(seed, layer, _BEFORE_ANY_STEP), zero, zero, hidden, keep)
    return torch.zeros(hidden, keep).scatter(0, kept, 1.0)


class SubspaceCodec(BoundaryCodec):
    """k coefficients a token. Deterministic between refreshes, so its error has a persistent direction."""

    name = "subspace"

    def __init__(self, seed: int, ratio: float) -> None:
        self.seed = seed
        self.ratio = ratio
        self.bases: dict[int, Tensor] = {}

    def keep(self, hidden: int) -> int:
        return kept_numbers(self.ratio, hidden)

    def describe(self, hidden: int) -> str:
        return f"{self.name}: {self.keep(hidden)} coefficients for {hidden} channels"

    def use(self, bases: Bases | None) -> None:
        """Put the bases of a fire into force (None: the initial ones). Raises IntegrityError for another shape."""
        for layer, basis in (bases or {}).items():
            if basis.ndim != 2 or basis.shape[1] != self.keep(basis.shape[0]):
                raise IntegrityError(f"basis of boundary {layer} has shape {tuple(basis.shape)}, not [H, k]")
        self.bases = dict(bases or {})

    def basis(self, layer: int, like: Tensor, hidden: int) -> Tensor:
        """Q of a boundary in the dtype and on the device of `like`."""
        if layer not in self.bases:
            self.bases[layer] = initial_basis(self.seed, layer, hidden, self.keep(hidden))
        return self.bases[layer].to(device=like.device, dtype=like.dtype)

    def send(self, x: Tensor, layer: int, step: int, tokens: TokenIds) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # the payload keeps the hidden state's dtype
            return x @ self.basis(layer, x, x.shape[1])

    def receive(self, payload: Tensor, hidden: int, layer: int, step: int, tokens: TokenIds) -> Tensor:
        with torch.autocast(payload.device.type, enabled=False):
            return payload @ self.basis(layer, payload, hidden).T


class BasisObserver(DenseCodec):
    """The dense codec, noting X^T (X Q) of every boundary that it carries. One observer a replay."""

    def __init__(self, codec: SubspaceCodec) -> None:
        self._codec = codec
        self._sums: dict[int, Tensor] = {}

    def send(self, x: Tensor, layer: int, step: int, tokens: TokenIds) -> Tensor:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            wide = x.detach().float()
            product = wide.T @ (wide @ self._codec.basis(layer, wide, x.shape[1]))
            known = self._sums.get(layer)
            self._sums[layer] = product if known is None else known + product
        return x

    def refreshed(self) -> dict[int, Tensor]:
        """One step of power iteration: orth(X^T (X Q)) of every boundary; one where nothing was carried, or something
        that is not finite, keeps its basis."""
        fresh = {
            layer: torch.linalg.qr(total.double()).Q.float()
            for layer, total in self._sums.items()
            if bool(total.isfinite().all())
        }
        return dict(sorted((self._codec.bases | fresh).items()))
