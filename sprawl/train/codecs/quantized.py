"""`quantized-prf`: more channels at fewer bits for the bytes of `prf`, around a mean that both ends know.

The status report's open problem is a lower-variance unbiased compression at the same wire cost. This one keeps m > k
channels under the keyed mask, rounds them stochastically (`rounding`), and sends their distance from the mean of what
the boundary received in the previous step: a control variate that costs nothing, because both ends hold it.

    forward    x_hat = mu + (H/m) mask (Q(x - mu))          E[x_hat] = x
    backward   g     = mask (nu + Q((H/m) g_hat - nu))      E over the rounding = the masked network's own gradient

mu, nu: [H] a boundary and direction, the average per channel of what was decoded during the step before (zeros at
first). The forward mean is taken from passes that carry a gradient, so reference and old log-prob passes do not move
it. Both sides keep their own: a sender decodes what it sent. The sums are fp64, so the order of addition (threads,
microbatches, devices) shows below 2^-50 only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sprawl.errors import ConfigError, IntegrityError
from sprawl.train import prf
from sprawl.train.codecs import rounding
from sprawl.train.codecs.base import BoundaryCodec, TokenIds
from sprawl.train.codecs.masked import kept_channels, kept_numbers

Direction = Literal["forward", "backward"]
Side = Literal["sender", "receiver"]

_ROUNDING_KEY = {"forward": 0x666F7277, "backward": 0x6261636B}
"""Folded into a mask's key: rounding noise is independent of the mask and of the other direction's noise."""


_STATE_NAME = re.compile(r"(\d+)\.(forward|backward)\.(sender|receiver)")


class RunningMean:
    """The mean in force [H] fp32, and the sums that will replace it when the next step begins."""

    def __init__(self, mean: Tensor) -> None:
        self.mean = mean
        self._total = torch.zeros_like(mean, dtype=torch.float64)
        self._count = torch.zeros_like(mean, dtype=torch.float64)

    def add(self, channel: Tensor, residual: Tensor) -> None:
        """Decoded distances from the mean, [n, m] fp32, at channels [n, m]."""
        index = channel.flatten()
        self._total.index_add_(0, index, residual.flatten().double())
        self._count += torch.bincount(index, minlength=self.mean.shape[0])

    @property
    def sums(self) -> tuple[Tensor, Tensor]:
        """[H] fp64, summed distances from the mean in force, and how many they are."""
        return self._total, self._count

    def next(self) -> Tensor:
        """The mean after this step. A channel that nothing finite came from keeps its own."""
        moved = self.mean.double() + self._total / self._count.clamp(min=1)
        return torch.where(moved.isfinite(), moved, self.mean.double()).float()


@dataclass(frozen=True)
class _Place:
    """One crossing: which boundary, which tokens."""

    layer: int
    step: int
    hidden: int
    tokens: TokenIds


class QuantizedPrfCodec(BoundaryCodec):
    """`bits` (3, 4 or 8) a channel; never more bytes than `prf` sends at the same ratio."""

    name = "quantized-prf"

    def __init__(self, seed: int, ratio: float, bits: int) -> None:
        self.seed = seed
        self.ratio = ratio
        self.bits = bits
        self._means: dict[tuple[int, Direction, Side], RunningMean] = {}

    def keep(self, hidden: int) -> int:
        return kept_numbers(self.ratio, hidden)

    def carried(self, hidden: int, itemsize: int) -> int:
        """Channels m that travel in the bytes of `keep` numbers of `itemsize` bytes.

        Raises ConfigError when those bytes hold not even one.
        """
        budget = self.keep(hidden) * itemsize
        count = rounding.values_in(budget, self.bits, hidden)
        if count == 0:
            raise ConfigError(
                f"boundary.ratio={self.ratio:g} leaves {budget} bytes a token of {hidden} channels: "
                f"too few for one {self.bits}-bit value and its scale",
                "raise boundary.ratio",
            )
        return count

    def describe(self, hidden: int) -> str:
        return f"{self.name}: {self.carried(hidden, 4)} of {hidden} channels at {self.bits} bits"

    def send(self, x: Tensor, layer: int, step: int, tokens: TokenIds) -> Tensor:
        payload: Tensor = _Send.apply(x, self, _Place(layer, step, x.shape[1], tokens), torch.is_grad_enabled())
        return payload

    def receive(self, payload: Tensor, hidden: int, layer: int, step: int, tokens: TokenIds) -> Tensor:
        place = _Place(layer, step, hidden, tokens)
        estimate: Tensor = _Receive.apply(payload, self, place, torch.is_grad_enabled())
        return estimate

    def begin(self, step: int) -> None:
        self._means = {key: RunningMean(known.next()) for key, known in self._means.items()}

    def state(self) -> dict[str, Tensor]:
        """The means as the next step will find them, `<boundary>.<direction>.<side>` -> [H] fp32."""
        return {".".join(map(str, key)): known.next() for key, known in sorted(self._means.items())}

    def held_by(self, name: str, stage: int) -> bool:
        layer, direction, side = name.split(".")
        behind = (direction == "forward") == (side == "sender")  # the end of the boundary that its first stage is
        return int(layer) + (0 if behind else 1) == stage

    def gathered(self) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for key, known in sorted(self._means.items()):
            sums[".".join(map(str, key)) + ".total"], sums[".".join(map(str, key)) + ".count"] = known.sums
        return sums

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        means: dict[tuple[int, Direction, Side], RunningMean] = {}
        for name, tensor in tensors.items():
            match = _STATE_NAME.fullmatch(name)
            if match is None:
                raise IntegrityError(
                    f"{name!r} is no state of codec {self.name}", "resume with the run's boundary.codec"
                )
            means[int(match[1]), match[2], match[3]] = RunningMean(tensor.clone())  # type: ignore[index]
        self._means = means

    def channels(self, place: _Place, itemsize: int) -> Tensor:
        """Kept channels [n, m] int64, ascending."""
        carried = self.carried(place.hidden, itemsize)
        return kept_channels(self.seed, carried, place.hidden, place.layer, place.step, place.tokens)

    def pack(self, values: Tensor, direction: Direction, place: _Place, dtype: torch.dtype, learn: bool) -> Tensor:
        """Values of the kept channels, [n, m] -> payload [n, k] of `dtype`: bytes, not numbers one could add."""
        channel, mean = self.channels(place, dtype.itemsize), self._mean(direction, "sender", place, values.device)
        key = prf.mix(prf.derive_key(self.seed, place.layer, place.step) ^ prf.mix(_ROUNDING_KEY[direction]))
        size = self.keep(place.hidden) * dtype.itemsize
        tokens, residual = place.tokens, values.float() - mean.mean[channel]
        data = rounding.encode(residual, key, tokens.sample, tokens.position, channel, self.bits, size)
        if learn:
            mean.add(channel, rounding.decode(data, channel.shape[1], self.bits))
        return data.view(dtype)

    def unpack(self, payload: Tensor, direction: Direction, place: _Place, learn: bool) -> tuple[Tensor, Tensor]:
        """Payload [n, k] -> decoded distances from the mean at the kept channels [n, m] fp32, and the mean [H]."""
        channel, mean = (
            self.channels(place, payload.element_size()),
            self._mean(direction, "receiver", place, payload.device),
        )
        residual = rounding.decode(payload.contiguous().view(torch.uint8), channel.shape[1], self.bits)
        if learn:
            mean.add(channel, residual)
        return residual, mean.mean

    def _mean(self, direction: Direction, side: Side, place: _Place, device: torch.device) -> RunningMean:
        key = (place.layer, direction, side)
        if key not in self._means:
            self._means[key] = RunningMean(torch.zeros(place.hidden, device=device))
        return self._means[key]


def _scattered(values: Tensor, channel: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """[n, m] at channels [n, m] -> [n, H], zeros elsewhere."""
    return torch.zeros(values.shape[0], hidden, dtype=dtype, device=values.device).scatter(1, channel, values.to(dtype))


class _Send(torch.autograd.Function):
    """Forward: encode the kept channels. Backward: decode the gradient that came back for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codec: QuantizedPrfCodec, place: _Place, learn: bool) -> Tensor:
        ctx.codec, ctx.place = codec, place
        kept = x.gather(1, codec.channels(place, x.element_size()))
        return codec.pack(kept, "forward", place, x.dtype, learn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, payload: Tensor) -> tuple[Tensor, None, None, None]:
        codec, place = ctx.codec, ctx.place
        residual, mean = codec.unpack(payload, "backward", place, learn=True)
        channel = codec.channels(place, payload.element_size())
        return _scattered(residual + mean[channel], channel, place.hidden, payload.dtype), None, None, None


class _Receive(torch.autograd.Function):
    """Forward: decode, scale, put the mean where nothing came. Backward: encode the gradient of the kept channels."""

    @staticmethod
    def forward(ctx: Any, payload: Tensor, codec: QuantizedPrfCodec, place: _Place, learn: bool) -> Tensor:
        ctx.codec, ctx.place = codec, place
        residual, mean = codec.unpack(payload, "forward", place, learn)
        channel = codec.channels(place, payload.element_size())
        scale = place.hidden / channel.shape[1]
        return _scattered(residual * scale, channel, place.hidden, payload.dtype) + mean.to(payload.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        codec, place = ctx.codec, ctx.place
        channel = codec.channels(place, gradient.element_size())
        kept = gradient.gather(1, channel) * (place.hidden / channel.shape[1])
        return codec.pack(kept, "backward", place, gradient.dtype, learn=True), None, None, None
