"""Who watches a run: the terminal prints lines, a flow run without a terminal logs them to Prefect."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from sprawl.board.records import EvaluationRecord, StepRecord
from sprawl.run.receipts import FinishReceipt, StartReceipt


class Progress(Protocol):
    """What `sprawl.run.terminal.Progress` offers; every call returns at once."""

    def start(self, receipt: StartReceipt) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvaluationRecord) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self, receipt: FinishReceipt, report_path: Path | None) -> None: ...


class LoggedProgress:
    """The same as lines in the flow run's log (INFO). `logger` is Prefect's run logger."""

    def __init__(self, logger: Any, every: int = 10) -> None:
        self._logger = logger
        self._every = every
        self._steps = 0

    def start(self, receipt: StartReceipt) -> None:
        done = f"resumed after step {receipt.head_step}" if receipt.resumed else "new"
        self._steps = receipt.steps
        self._logger.info("run %s: %s, %d steps, %s", receipt.run_id, done, receipt.steps, receipt.boundary)

    def step(self, record: StepRecord) -> None:
        if record.step % self._every == 0 or record.step == self._steps:
            seconds = record.seconds.get("total", 0.0)
            self._logger.info("step %d/%d reward %.2f, %.1f s", record.step, self._steps, record.reward, seconds)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._logger.info("version %d: %d of %d correct", record.version, record.correct, record.problems)

    def note(self, text: str) -> None:
        self._logger.info("%s", text)

    def finish(self, receipt: FinishReceipt, report_path: Path | None) -> None:
        self._logger.info("finished: %d versions verified, report %s", receipt.versions_verified, report_path)
        for violation in receipt.violations:
            self._logger.warning("violation: %s", violation)


class Both:
    """Two watchers: the terminal a run was started in, and the log that the UI shows."""

    def __init__(self, *watchers: Progress) -> None:
        self._watchers = watchers

    def start(self, receipt: StartReceipt) -> None:
        for watcher in self._watchers:
            watcher.start(receipt)

    def step(self, record: StepRecord) -> None:
        for watcher in self._watchers:
            watcher.step(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        for watcher in self._watchers:
            watcher.evaluation(record)

    def note(self, text: str) -> None:
        for watcher in self._watchers:
            watcher.note(text)

    def finish(self, receipt: FinishReceipt, report_path: Path | None) -> None:
        for watcher in self._watchers:
            watcher.finish(receipt, report_path)
