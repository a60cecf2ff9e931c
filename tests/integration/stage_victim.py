"""A trainer process that kills itself at a point of a step: `python -m tests.integration.stage_victim POINT N`.

Without a point it is `sprawl.run.stage_server`, untouched.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import sprawl.run.stage_share as stage_share
from sprawl.board.parts import PartWriter
from sprawl.policy import Decoder
from sprawl.run.stage_server import serve
from sprawl.run.stage_share import StageShare
from sprawl.train.runtime.pipelined import _CountingStage

POINTS = ("forward", "backward", "optimizer", "publish", "checkpoint")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def arm(point: str, deadly_step: int) -> None:
    now = {"step": 0}

    def dying(call: Callable[..., Any], when: Callable[..., bool], *, after: bool = False) -> Callable[..., Any]:
        def armed(*arguments: Any, **options: Any) -> Any:
            if not after and when(*arguments):
                die()
            result = call(*arguments, **options)
            if after and when(*arguments):
                die()
            return result

        return armed

    def in_step(*_: Any) -> bool:
        return now["step"] == deadly_step

    def train(self: StageShare, step: int, *rest: Any) -> Any:
        now["step"] = step
        return trained(self, step, *rest)

    trained = StageShare.train
    StageShare.train = train  # type: ignore[method-assign]
    if point == "forward":
        when = lambda *_: in_step() and torch.is_grad_enabled()  # noqa: E731
        Decoder.run_layers = dying(Decoder.run_layers, when)  # type: ignore[method-assign]
    elif point == "backward":
        _CountingStage.get_bwd_send_ops = dying(_CountingStage.get_bwd_send_ops, in_step)  # type: ignore[method-assign]
    elif point == "optimizer":
        torch.optim.AdamW.step = dying(torch.optim.AdamW.step, in_step, after=True)  # type: ignore[method-assign]
    elif point == "publish":
        PartWriter.write = dying(PartWriter.write, in_step, after=True)  # type: ignore[method-assign]
    elif point == "checkpoint":
        stage_share.write_shard = dying(stage_share.write_shard, in_step, after=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        arm(sys.argv[1], int(sys.argv[2]))
    sys.exit(serve())
