"""Progress in the terminal: one line a step, readable in a log file too."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from rich.console import Console

from sprawl.board.records import EvaluationRecord, StepRecord
from sprawl.run.receipts import FinishReceipt, StartReceipt

WINDOW = 20


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def human_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Progress:
    """Prints a run as it goes. Knows nothing about who drives it."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._steps = 0
        self._recent: deque[StepRecord] = deque(maxlen=WINDOW)
        self._last = time.monotonic()

    def start(self, receipt: StartReceipt) -> None:
        self._steps = receipt.steps
        state = "resumed" if receipt.resumed else "started"
        self.note(f"[bold]{receipt.run_id}[/bold] {state}: {receipt.parameters:,} parameters, {receipt.boundary}")
        if receipt.head_step:
            replayed = f", {receipt.replayed} of them replayed from the board" if receipt.replayed else ""
            self.note(f"{receipt.head_step} of {receipt.steps} steps are committed{replayed}")
        self.console.print(
            "[dim] step      reward  mean20  mismatch  grad norm   changed    delta sent  boundary sent   s/step[/dim]",
            soft_wrap=True,
        )
        self._last = time.monotonic()

    def step(self, record: StepRecord) -> None:
        self._recent.append(record)
        mean = sum(r.reward for r in self._recent) / len(self._recent)
        seconds = record.seconds.get("total", 0.0)
        marks = " [cyan]keyframe[/cyan]" if record.kind == "keyframe" else ""
        if record.sign.sent:
            marks += f" [magenta]anchor fire {record.sign_fire}[/magenta]"
        if record.control is not None and record.control.level:
            marks += f" [yellow]control level {record.control.level}[/yellow]"
        if not record.applied:
            marks += " [red]refused: gradient not finite[/red]"
        left = (self._steps - record.step) * sum(r.seconds.get("total", 0.0) for r in self._recent) / len(self._recent)
        self.console.print(
            f"{record.step:5d}/{self._steps:<5d} {record.reward:5.3f}   {mean:5.3f} {record.mismatch:9.4g}"
            f"  {record.grad_norm:9.4g}  {record.changed_share:8.2%} {human_bytes(record.delta.sent):>13}"
            f"  {human_bytes(record.boundary.sent):>13} {seconds:8.2f}{marks}"
            + (f"  [dim]{human_seconds(left)} left[/dim]" if record.step % 10 == 0 and left > 0 else ""),
            soft_wrap=True,
        )

    def evaluation(self, record: EvaluationRecord) -> None:
        self.note(
            f"evaluation at version {record.version}: greedy accuracy [bold]{record.accuracy:.3f}[/bold] "
            f"({record.correct}/{record.problems} held-out problems, {record.seconds:.1f} s)"
        )

    def note(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def finish(self, receipt: FinishReceipt, report: Path | None) -> None:
        verdict = "[green]no violations[/green]" if not receipt.violations else "[red]violations:[/red]"
        self.note(
            f"finished after {receipt.steps} steps; {receipt.versions_verified} versions rebuilt bit for bit, {verdict}"
        )
        for violation in receipt.violations:
            self.note(f"  [red]{violation}[/red]")
        if report is not None:
            self.note(f"report: [bold]{report}[/bold]")
