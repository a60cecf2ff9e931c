"""A run that trains nothing: its steps take as long as they should, and its ledger is a real one. What is left of a
step's time is what drives it."""

from __future__ import annotations

import time
from pathlib import Path

from sprawl import __version__
from sprawl.board.ledger import Ledger
from sprawl.board.reader import VersionReader
from sprawl.board.records import EvaluationRecord, RunRecord, StepRecord, Views, Wire
from sprawl.board.store import open_store
from sprawl.config import RunConfig, parse_config
from sprawl.run.receipts import CollectReceipt, FinishReceipt, PublishReceipt, StartReceipt, TrainReceipt


def step_record(step: int) -> StepRecord:
    """The ledger's record of a step at which nothing remarkable happened."""
    wire = Wire(sent=5, dense=100)
    return StepRecord(
        step=step,
        epoch=1,
        version=step,
        finished_at=float(step),
        reward=0.5,
        reward_std=0.1,
        groups=2,
        zero_advantage_groups=0,
        response_tokens=10,
        response_length=5.0,
        entropy=Views(compression=1.0),
        kl=Views(compression=0.0),
        mismatch=0.1,
        ratio_max_error=0.0,
        clip_share=0.0,
        loss=0.0,
        grad_norm=1.0,
        applied=True,
        staleness=0.0,
        staleness_max=0,
        boundary=wire,
        delta=wire,
        sign=Wire(sent=0, dense=0),
        changed_share=0.01,
        seconds={"total": 1.0},
    )


class IdleSession:
    """As much of `RunSession` as what drives it uses. `seconds`: of a step. `begun`: `time.perf_counter()` when each
    step began, `spent`: CPU seconds of this process until then. The board is `runs` in the working directory."""

    def __init__(self, steps: int, seconds: float) -> None:
        self.config: RunConfig = parse_config({"name": "idle", "steps": steps, "policy": {"base": "none"}}, "benchmark")
        self.run_id = f"idle-{seconds:g}-{time.time_ns()}"
        self.board, self.log_dir = str(Path.cwd() / "runs"), Path.cwd()
        self.store = open_store(self.board, create=True)
        self.ledger = Ledger(self.store, self.run_id)
        self.reader = VersionReader(self.store, self.run_id)
        self.ledger.create_run(
            RunRecord(
                run_id=self.run_id,
                created_at=time.time(),
                config=self.config.model_dump(mode="json"),
                base_digest="",
                parameters=0,
                sprawl_version=__version__,
            )
        )
        self.head_step = 0
        self.begun: list[float] = []
        self.spent: list[float] = []
        self._seconds = seconds

    def prepare(self) -> StartReceipt:
        return StartReceipt(self.run_id, self.head_step, self.config.steps, False, 0, 0, "none")

    def collect(self, step: int) -> CollectReceipt:
        self.begun.append(time.perf_counter())
        self.spent.append(time.process_time())
        return CollectReceipt(step, 1, 0.0, 1, [step - 1], 0.0, False)

    def train(self, step: int) -> TrainReceipt:
        time.sleep(self._seconds)
        return TrainReceipt(step, 0.0, 1.0, True, None, self._seconds, False)

    def publish(self, step: int) -> PublishReceipt:
        self.ledger.write_step(step_record(step).model_copy(update={"finished_at": time.time()}))
        self.head_step = step
        return PublishReceipt(step, step, "delta", 5, 100, 0.01, "", 0.0, False)

    def evaluation_due(self, step: int) -> bool:
        return False

    def evaluate(self, step: int) -> EvaluationRecord:
        raise NotImplementedError("no step of this run is evaluated")

    def finish(self) -> FinishReceipt:
        return FinishReceipt(self.run_id, self.head_step, 0)

    def close(self) -> None:
        pass
