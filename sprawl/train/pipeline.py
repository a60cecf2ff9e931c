"""The staged forward pass, in one process: stages are slices of the decoder, boundaries are real payload tensors.

This runtime simulates the wire: the same tensors cross that a socket would carry, and their sizes are counted, but
stages share a process. `sprawl.train.runtime` sends the same payloads between stage processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sprawl.policy import Decoder
from sprawl.rollout.trajectories import RolloutBatch
from sprawl.train import grpo
from sprawl.train.codecs import BoundaryCodec, TokenIds, WireCounter, cross


@dataclass(frozen=True)
class Packed:
    """Some rows of a batch, right-padded, with the positions whose next token is trained on: a response token, sampled
    by the policy itself.

    ids: [B, T] int64. select: [m] int64 rows of the flattened [B*T] positions, in sample order; targets: [m] int64
    the tokens that follow them. tokens: the real tokens, as the boundary codec addresses them.
    """

    ids: Tensor
    select: Tensor
    targets: Tensor
    tokens: TokenIds


def pack(
    tokens: Tensor, prompt_lengths: Tensor, response_lengths: Tensor, rows: Tensor, loss_mask: Tensor | None = None
) -> Packed:
    """Cut `rows` ([b] int64) out of a batch: tokens [N, L], lengths [N]. Sample numbers stay those of the batch.

    `loss_mask` ([N, R] bool, over response positions) leaves out tokens that the policy read but did not sample.
    """
    prompt, response = prompt_lengths[rows], response_lengths[rows]
    total = prompt + response
    width = int(total.max())
    ids = tokens[rows, :width].to(torch.int64)
    position = torch.arange(width)
    real = position[None, :] < total[:, None]
    # The position before a response token predicts it.
    predicts = (position[None, :] >= (prompt - 1)[:, None]) & (position[None, :] < (total - 1)[:, None])
    if loss_mask is not None:
        answered = (position[None, :] + 1 - prompt[:, None]).clamp(0, loss_mask.shape[1] - 1)
        predicts &= loss_mask[rows].gather(1, answered)
    index = real.flatten().nonzero().squeeze(1)
    select = predicts.flatten().nonzero().squeeze(1)
    following = torch.cat((ids[:, 1:], ids[:, :1]), dim=1)
    ids = ids.masked_fill(~real, 0)
    return Packed(
        ids=ids,
        select=select,
        targets=following.flatten()[select],
        tokens=TokenIds(sample=rows[index // width], position=index % width, index=index),
    )


def pack_rows(batch: RolloutBatch, rows: Tensor) -> Packed:
    """`pack` of a batch's own tokens, lengths and mask."""
    return pack(batch.tokens, batch.prompt_lengths, batch.response_lengths, rows, batch.loss_mask)


@dataclass(frozen=True)
class TokenStats:
    """Per response token, in sample order: log-prob of the token taken and entropy of the distribution, nats, [m]."""

    logprobs: Tensor
    entropy: Tensor


def token_stats(distribution: Tensor, packed: Packed) -> TokenStats:
    """What the log-probs [m, V] of every token say about those taken."""
    with torch.no_grad():
        entropy = grpo.entropy(distribution)
    return TokenStats(distribution.gather(1, packed.targets[:, None]).squeeze(1), entropy)


def read_head(decoder: Decoder, x: Tensor, packed: Packed, temperature: float) -> Tensor:
    """Hidden states [B, T, H] behind the last layer -> fp32 log-probs [m, V] at the selected positions."""
    x = x.reshape(-1, x.shape[-1]).index_select(0, packed.select)
    return torch.log_softmax(decoder.head(x) / temperature, dim=-1)


class StagedPolicy:
    """A decoder cut into stages with a codec at every boundary. `codec=None` is the dense view."""

    def __init__(
        self, decoder: Decoder, layers: list[range], compute_dtype: torch.dtype, *, recompute: bool = False
    ) -> None:
        self.decoder = decoder
        self.layers = layers
        self.compute_dtype = compute_dtype
        self.recompute = recompute

    @property
    def boundaries(self) -> int:
        return len(self.layers) - 1

    def token_stats(
        self,
        packed: Packed,
        *,
        codec: BoundaryCodec | None,
        step: int,
        temperature: float = 1.0,
        wire: WireCounter | None = None,
    ) -> TokenStats:
        """Log-probs of the response tokens taken; see `distributions`."""
        return token_stats(
            self.distributions(packed, codec=codec, step=step, temperature=temperature, wire=wire), packed
        )

    def distributions(
        self,
        packed: Packed,
        *,
        codec: BoundaryCodec | None,
        step: int,
        temperature: float = 1.0,
        wire: WireCounter | None = None,
    ) -> Tensor:
        """One forward pass over all stages: fp32 log-probs [m, V] of every token at the positions before a response
        token. The mask depends on (codec seed, boundary, step, sample, position)."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
            x = self.decoder.embed(packed.ids)
            rotary = self.decoder.rotary(0, packed.ids.shape[1], x.dtype)
            for stage, layers in enumerate(self.layers):
                x = self.decoder.run_layers(x, layers, rotary, recompute=self.recompute)
                if codec is not None and stage < self.boundaries:
                    x = cross(x, codec, stage, step, packed.tokens, wire)
            return read_head(self.decoder, x, packed, temperature)
