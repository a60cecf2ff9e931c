"""What Prefect adds to a step: seconds of it at steps of 0, 1 and 10 s, and memory of the flow over many steps.

    python -m benchmarks.orchestration            0, 1 and 10 s steps; memory over 5,000 steps (10 minutes)
    python -m benchmarks.orchestration --quick    the same with few steps: under 60 s
    python -m benchmarks.orchestration --json     one JSON object

The real flow with its tasks, events and artifacts, on a real server that this starts, over a session whose steps do
nothing for as long as they should. The same session is driven by a plain loop too, and `added` is the difference: mean
seconds from one step's beginning to the next's. Both share the machine with the server, as they do in life. Memory is
what the process gained between the end of the first tenth of the steps and the end of all, with flow runs of 1,000
steps (what `segment` is) and with one flow run for all of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import click
import psutil

from benchmarks.command import run
from infra.limits import SEGMENT
from sprawl import __version__
from sprawl.board.ledger import Ledger
from sprawl.board.records import EvaluationRecord, RunRecord, StepRecord, Views, Wire
from sprawl.board.store import open_store
from sprawl.config import RunConfig, parse_config
from sprawl.run.receipts import CollectReceipt, FinishReceipt, PublishReceipt, StartReceipt, TrainReceipt

FULL = {0.0: 500, 1.0: 60, 10.0: 12}  # seconds of a step -> steps
QUICK = {0.0: 60, 1.0: 8}
MEMORY_STEPS, QUICK_MEMORY_STEPS = 5000, 100
TARGET = 0.02  # of a step of one second


class IdleSession:
    """A run whose steps take `seconds` each and do nothing. `begun`: when each step began. Its ledger is on disk, in
    the working directory, as a real one would be."""

    def __init__(self, steps: int, seconds: float) -> None:
        self.config: RunConfig = parse_config({"name": "idle", "steps": steps, "policy": {"base": "none"}}, "benchmark")
        self.run_id = f"idle-{seconds:g}-{time.time_ns()}"
        self.board, self.log_dir = str(Path.cwd() / "runs"), Path.cwd()
        self.store = open_store(self.board, create=True)
        self.ledger = Ledger(self.store, self.run_id)
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
        self._seconds = seconds

    def prepare(self) -> StartReceipt:
        return StartReceipt(self.run_id, 0, self.config.steps, False, 0, 0, "none")

    def collect(self, step: int) -> CollectReceipt:
        self.begun.append(time.perf_counter())
        return CollectReceipt(step, 1, 0.0, 1, [step - 1], 0.0, False)

    def train(self, step: int) -> TrainReceipt:
        time.sleep(self._seconds)
        return TrainReceipt(step, 0.0, 1.0, True, None, self._seconds, False)

    def publish(self, step: int) -> PublishReceipt:
        self.ledger.write_step(_record(step))
        self.head_step = step
        return PublishReceipt(step, step, "delta", 1, 1, 0.0, "", 0.0, False)

    def evaluation_due(self, step: int) -> bool:
        return False

    def evaluate(self, step: int) -> EvaluationRecord:
        raise NotImplementedError("no step of this run is evaluated")

    def finish(self) -> FinishReceipt:
        return FinishReceipt(self.run_id, self.head_step, 0)

    def close(self) -> None:
        pass


def _record(step: int) -> StepRecord:
    wire = Wire(sent=1, dense=1)
    return StepRecord(
        step=step,
        epoch=1,
        version=step,
        finished_at=0.0,
        reward=0.0,
        reward_std=0.0,
        groups=1,
        zero_advantage_groups=0,
        response_tokens=1,
        response_length=1.0,
        mismatch=0.0,
        entropy=Views(compression=0.0),
        kl=Views(compression=0.0),
        ratio_max_error=0.0,
        clip_share=0.0,
        loss=0.0,
        grad_norm=0.0,
        applied=True,
        staleness=0.0,
        staleness_max=0,
        boundary=wire,
        delta=wire,
        sign=wire,
        changed_share=0.0,
        seconds={"total": 0.0},
    )


@dataclass
class Silent:
    """Nobody watches."""

    notes: list[str] = field(default_factory=list)

    def start(self, receipt: Any) -> None: ...

    def step(self, record: Any) -> None: ...

    def evaluation(self, record: Any) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self, receipt: Any, report_path: Path | None) -> None: ...


@dataclass(frozen=True)
class Row:
    """Seconds, means a step. `share`: of the step's own length, None for steps of no length."""

    step_s: float
    steps: int
    plain_s: float
    flow_s: float
    added_s: float
    share: float | None


@dataclass(frozen=True)
class Memory:
    steps: int
    segment: int
    gained_mib: float
    kib_a_step: float


def drive_plain(session: IdleSession) -> None:
    session.prepare()
    for step in range(1, session.config.steps + 1):
        session.collect(step)
        session.train(step)
        session.publish(step)


def drive_flow(session: IdleSession, segment: int = SEGMENT) -> None:
    """As a terminal does: one flow run a segment, in this process."""
    from flows.post_train import ATTACHED, Attached, post_train

    attached = Attached(cast(Any, session), Silent())
    token = ATTACHED.set(attached)
    try:
        while attached.finished is None:
            post_train(segment=segment)
    finally:
        ATTACHED.reset(token)


def mean_step(session: IdleSession) -> float:
    return (session.begun[-1] - session.begun[0]) / (len(session.begun) - 1)


def measure(step_s: float, steps: int) -> Row:
    plain, flow = IdleSession(steps, step_s), IdleSession(steps, step_s)
    drive_plain(plain)
    drive_flow(flow)
    added = mean_step(flow) - mean_step(plain)
    return Row(step_s, steps, mean_step(plain), mean_step(flow), added, added / step_s if step_s else None)


def measure_memory(steps: int, segment: int, environment: dict[str, str]) -> Memory:
    """In a process of its own, so that nothing that ran before is counted."""
    from flows import server

    server.use(environment)
    server.quiet_console()
    session, early = IdleSession(steps, 0.0), 0
    me = psutil.Process()
    publish = session.publish

    def watched(step: int) -> PublishReceipt:
        nonlocal early
        if step == max(1, steps // 10):
            early = me.memory_info().rss
        return publish(step)

    session.publish = watched  # type: ignore[method-assign]
    drive_flow(session, segment)
    gained = me.memory_info().rss - early
    return Memory(steps, segment, gained / 2**20, gained / 2**10 / (steps - max(1, steps // 10)))


@contextmanager
def serving() -> Iterator[dict[str, str]]:
    """A stack in a directory that is thrown away; the environment that finds its server."""
    from infra import ports
    from infra.stack import Stack

    with tempfile.TemporaryDirectory(prefix="orchestration-") as folder:
        stack = Stack(Path(folder) / ".sprawl")
        here = Path.cwd()
        try:
            info = stack.up(ports.next_free(4300), wait_s=300.0)
            os.chdir(folder)  # what flow runs leave behind
            yield stack.environment(info.api_url)
        finally:
            os.chdir(here)
            stack.down()


def table(rows: list[Row], memory: list[Memory]) -> str:
    lines = ["| step | steps | plain loop | flow | added a step | of the step |", "|---|---|---|---|---|---|"]
    for row in rows:
        share = "" if row.share is None else f"{100 * row.share:.2f} %"
        times = f"{row.plain_s:.4f} s | {row.flow_s:.4f} s | {1000 * row.added_s:.1f} ms"
        lines.append(f"| {row.step_s:g} s | {row.steps} | {times} | {share} |")
    lines += ["", "| steps | steps a flow run | memory gained | a step |", "|---|---|---|---|"]
    lines += [
        f"| {item.steps} | {item.segment} | {item.gained_mib:.1f} MiB | {item.kib_a_step:.2f} KiB |" for item in memory
    ]
    return "\n".join(lines)


@click.command(name="orchestration")
@click.option("--quick", is_flag=True, help="Few steps: under 60 s.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(quick: bool, as_json: bool) -> None:
    """Seconds that orchestration adds to a step, and memory that it takes over many."""
    from flows import server

    steps = QUICK_MEMORY_STEPS if quick else MEMORY_STEPS
    with serving() as environment:
        server.use(environment)
        server.quiet_console()
        rows = [measure(step_s, count) for step_s, count in (QUICK if quick else FULL).items()]
        memory = []
        for segment in (SEGMENT,) if quick else (SEGMENT, steps):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                memory.append(pool.submit(measure_memory, steps, segment, environment).result())
        server.flush()
    (second,) = (row for row in rows if row.step_s == 1.0)
    met = second.share is not None and second.share < TARGET
    if as_json:
        found = {"rows": [asdict(row) for row in rows], "memory": [asdict(item) for item in memory], "met": met}
        click.echo(json.dumps(found))
    else:
        click.echo(table(rows, memory))
        click.echo(f"\ntarget: under {100 * TARGET:g} % at steps of 1 s: {'met' if met else 'not met'}")


if __name__ == "__main__":
    run(main)
