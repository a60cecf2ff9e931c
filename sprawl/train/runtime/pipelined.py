"""A stage in a process of its own: `torch.distributed.pipelining` moves payloads to and from its neighbours.

The module of a stage scatters the payload it gets, runs its layers and gathers the payload it sends, so only
`[rows, k]` tensors cross, forward and backward. `rows` is the same for all microbatches of a pass, because the buffers
of a schedule are: real tokens first, padding counted. Which tokens, masks and targets a microbatch has every process
knows itself; the schedule hands it the number only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from sprawl.policy import Decoder
from sprawl.policy.stage import StagePlace
from sprawl.train.codecs import WireCounter, arrive, leave
from sprawl.train.passes import Crossing, Which
from sprawl.train.pipeline import Packed, TokenStats, read_head, token_stats

KEPT_SCHEDULES = 8
"""Schedules are made for a shape and hold its buffers; a run of equal shapes needs five, changing ones evict."""


@dataclass(frozen=True)
class _Shape:
    """What a schedule is made for: payloads [rows, width] of `dtype`, `count` microbatches."""

    learning: bool
    count: int
    rows: int
    width: int
    dtype: torch.dtype


class _Work(nn.Module):
    """What the pipeline calls with a payload and a microbatch's number; `run` is set for each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Callable[[int, Tensor], Tensor]

    def forward(self, payload: Tensor, number: Tensor) -> Tensor:
        return self.run(int(number), payload)


class _CountingStage(PipelineStage):
    """Counts what is handed to the wire, send by send."""

    def __init__(self, work: _Work, place: StagePlace, shape: _Shape, group: dist.ProcessGroup) -> None:
        payload = torch.zeros(shape.rows, shape.width, dtype=shape.dtype, requires_grad=shape.learning)
        nothing = torch.zeros(1, requires_grad=shape.learning)
        super().__init__(
            work,
            place.index,
            place.count,
            torch.device("cpu"),
            input_args=(torch.zeros(1, dtype=torch.int64),) if place.first else (payload,),
            output_args=(nothing if place.last else payload,),
            group=group,
        )
        self.wire = WireCounter()
        self.real: list[int] = []  # tokens of each microbatch
        self.hidden = 0

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id), fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id), bwd_chunk_id)

    def _counted(self, operations: list[dist.P2POp], number: int) -> list[dist.P2POp]:
        for operation in operations:
            rows, width = operation.tensor.shape
            size = operation.tensor.element_size()
            self.wire.sent += rows * width * size
            self.wire.padding += (rows - self.real[number]) * width * size
            self.wire.dense += self.real[number] * self.hidden * size
        return operations


class PipelinedPasses:
    """The `Passes` of one stage; all stages of the pipeline make the same calls."""

    def __init__(
        self,
        place: StagePlace,
        policy: Decoder,
        reference: Decoder,
        group: dist.ProcessGroup,
        compute_dtype: torch.dtype,
        *,
        recompute: bool = False,
    ) -> None:
        self._place = place
        self._models: dict[Which, Decoder] = {"policy": policy, "reference": reference}
        self._group = group
        self._compute_dtype = compute_dtype
        self._recompute = recompute
        self._work = _Work()
        self._schedules: OrderedDict[_Shape, tuple[_CountingStage, ScheduleGPipe | Schedule1F1B]] = OrderedDict()

    @torch.no_grad()
    def read(
        self, which: Which, packs: Sequence[Packed], crossing: Crossing, take: Callable[[int, Tensor], None]
    ) -> None:
        def end(number: int, distribution: Tensor) -> Tensor:
            take(number, distribution)
            return torch.zeros(1)

        self._run(which, packs, crossing, end, learning=False)

    def learn(self, packs: Sequence[Packed], crossing: Crossing, loss: Callable[[int, TokenStats], Tensor]) -> None:
        def end(number: int, distribution: Tensor) -> Tensor:
            return loss(number, token_stats(distribution, packs[number])).reshape(1)

        self._run("policy", packs, crossing, end, learning=True)

    def _run(
        self,
        which: Which,
        packs: Sequence[Packed],
        crossing: Crossing,
        end: Callable[[int, Tensor], Tensor],
        *,
        learning: bool,
    ) -> None:
        decoder, count = self._models[which], len(packs)
        real = [packed.tokens.index.shape[0] for packed in packs]
        shape = _Shape(
            learning,
            count,
            max(real),
            crossing.codec.keep(decoder.arch.hidden),
            next(decoder.parameters()).dtype,
        )

        def run(number: int, payload: Tensor) -> Tensor:
            return self._forward(decoder, packs[number], payload, crossing, shape.rows, lambda x: end(number, x))

        self._work.run = run
        stage, schedule = self._schedule(shape)
        stage.wire, stage.real, stage.hidden = crossing.wire, real, decoder.arch.hidden
        numbers = torch.arange(count)
        inputs = (numbers,) if self._place.first else ()
        target = numbers if learning and self._place.last else None
        schedule.step(*inputs, target=target, return_outputs=False, number=numbers)
        stage.clear_runtime_states()

    def _forward(
        self,
        decoder: Decoder,
        packed: Packed,
        payload: Tensor,
        crossing: Crossing,
        rows: int,
        end: Callable[[Tensor], Tensor],
    ) -> Tensor:
        place, codec, step, tokens = self._place, crossing.codec, crossing.step, packed.tokens
        real = tokens.index.shape[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=self._compute_dtype == torch.bfloat16):
            if place.first:
                x = decoder.embed(packed.ids)
            else:
                shape = (*packed.ids.shape, decoder.arch.hidden)
                x = arrive(payload[:real], shape, codec, place.index - 1, step, tokens)
            rotary = decoder.rotary(0, packed.ids.shape[1], x.dtype)
            x = decoder.run_layers(x, place.layers, rotary, recompute=self._recompute)
            if not place.last:
                leaving = leave(x, codec, place.index, step, tokens)
                return F.pad(leaving, (0, 0, 0, rows - real)) if rows > real else leaving.contiguous()
            distribution = read_head(decoder, x, packed, crossing.temperature)
        return end(distribution)

    def _schedule(self, shape: _Shape) -> tuple[_CountingStage, ScheduleGPipe | Schedule1F1B]:
        if shape in self._schedules:
            self._schedules.move_to_end(shape)
            return self._schedules[shape]
        stage = _CountingStage(self._work, self._place, shape, self._group)
        loss = _as_it_is if shape.learning else None
        # One forward, one backward keeps few activations alive; it needs a microbatch a stage to fill the pipeline.
        kind = Schedule1F1B if shape.learning and shape.count >= self._place.count else ScheduleGPipe
        self._schedules[shape] = stage, kind(stage, shape.count, loss_fn=loss, scale_grads=False)
        while len(self._schedules) > KEPT_SCHEDULES:
            self._schedules.popitem(last=False)
        return self._schedules[shape]


def _as_it_is(output: Tensor, target: Tensor) -> Tensor:
    """The last stage's module ends with the loss itself."""
    return output.sum()
