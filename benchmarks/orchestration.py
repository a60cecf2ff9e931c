"""What Prefect adds to a step: seconds of it at steps of 0, 1 and 10 s, and memory of the flow over many steps.

    python -m benchmarks.orchestration            0, 1 and 10 s steps; memory over 5,000 steps (15 minutes)
    python -m benchmarks.orchestration --quick    0 and 1 s steps, few of them
    python -m benchmarks.orchestration --json     one JSON object

The real flow with its tasks, events and artifacts, on a real server that this starts, over a session whose steps do
nothing for as long as they should (benchmarks/idle.py). The same session is driven by a plain loop too, in turns with
the flow, and `added` is the difference of the mean seconds from one step's beginning to the next's; `median` is that of
the medians, which what else the machine does disturbs less. CPU is what this process, and the server, took a step; this
one's without the plain loop's. Both share the machine with the server, as they do in life. What a flow run costs once,
at its start and end, is told apart: a run of many steps has one for every 1,000.

Memory is the resident set after each flow run of 1,000 steps (which is what `segment` is), when all events have been
sent. The first flow run loads what draws its page, and the second still fills what is kept for use again: growth is
what comes after that.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import click
import psutil

from benchmarks.command import run
from benchmarks.idle import IdleSession
from infra.limits import SEGMENT
from sprawl.errors import SprawlError

FULL = {0.0: 150, 1.0: 20, 10.0: 5}  # seconds of a step -> steps of a turn
QUICK = {0.0: 20, 1.0: 5}
TURNS, QUICK_TURNS = 3, 2
WARM_UP = 3  # steps before anything is measured: imports, connections
MEMORY_STEPS, QUICK_MEMORY_STEPS = 5000, 60
TARGET = 0.02  # of a step of one second


class Silent:
    """Nobody watches."""

    def start(self, receipt: Any) -> None: ...

    def step(self, record: Any) -> None: ...

    def evaluation(self, record: Any) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self, receipt: Any, report_path: Path | None) -> None: ...


@dataclass(frozen=True)
class Turn:
    """`steps`: seconds from one step's beginning to the next's. `cpu_s`: CPU seconds of this process in them, all its
    threads. `once_s`: seconds before the first step began and after the last one ended."""

    steps: list[float]
    cpu_s: float
    once_s: float


@dataclass(frozen=True)
class Row:
    """Seconds a step; `plain_s` and `flow_s` are means. `share`: added of the step's own length, None for steps of no
    length. `cpu_s`: of this process, added; `server_cpu_s`: of the server, for steps and for what a flow run is once.
    `once_s`: a flow run, without its steps."""

    step_s: float
    steps: int
    plain_s: float
    flow_s: float
    added_s: float
    median_s: float
    share: float | None
    cpu_s: float
    server_cpu_s: float
    once_s: float


@dataclass(frozen=True)
class Memory:
    """MiB of the resident set after so many steps, `segment` of them a flow run, and the growth a step from the second
    flow run's end to the last's; None where those are too few steps to tell it from what is filled once."""

    segment: int
    rss_mib: dict[int, float]
    kib_a_step: float | None


def drive_plain(session: IdleSession, steps: int) -> Turn:
    """As `sprawl run --runner plain` does."""
    watcher = Silent()
    began = time.perf_counter()
    watcher.start(session.prepare())
    for step in range(1, steps + 1):
        session.collect(step)
        session.train(step)
        session.publish(step)
        watcher.step(session.ledger.step(step))
    return _turn(session, began)


def drive_flow(session: IdleSession, steps: int, segment: int) -> Turn:
    """As a terminal does: one flow run a segment, in this process. The run is longer than what is driven of it, so that
    its end (checks, a page of figures), which costs the plain runner the same, is not measured."""
    from flows.post_train import ATTACHED, Attached, post_train

    assert steps % segment == 0
    assert session.config.steps > steps
    began = time.perf_counter()
    token = ATTACHED.set(Attached(cast(Any, session), Silent()))
    try:
        while session.head_step < steps:
            post_train(segment=segment)
    finally:
        ATTACHED.reset(token)
    return _turn(session, began)


def _turn(session: IdleSession, began: float) -> Turn:
    steps = [later - earlier for earlier, later in pairwise(session.begun)]
    whole = time.perf_counter() - began
    return Turn(steps, session.spent[-1] - session.spent[0], whole - sum(steps) - statistics.fmean(steps))


def compare(step_s: float, plain: list[Turn], flow: list[Turn], server_cpu_s: float) -> Row:
    """One row of the table from turns of the same steps with and without the flow. `server_cpu_s`: while it ran."""
    before = [step for turn in plain for step in turn.steps]
    after = [step for turn in flow for step in turn.steps]
    added = statistics.fmean(after) - statistics.fmean(before)
    return Row(
        step_s=step_s,
        steps=len(after),
        plain_s=statistics.fmean(before),
        flow_s=statistics.fmean(after),
        added_s=added,
        median_s=statistics.median(after) - statistics.median(before),
        share=added / step_s if step_s else None,
        cpu_s=(sum(turn.cpu_s for turn in flow) - sum(turn.cpu_s for turn in plain)) / len(after),
        server_cpu_s=server_cpu_s / len(after),
        once_s=statistics.fmean(turn.once_s for turn in flow),
    )


def measure(step_s: float, steps: int, turns: int, server: psutil.Process) -> Row:
    plain, flow, spent = [], [], 0.0
    for _ in range(turns):
        plain.append(drive_plain(IdleSession(steps + 1, step_s), steps))
        before = _cpu_s(server)
        flow.append(drive_flow(IdleSession(steps + 1, step_s), steps, steps))
        spent += _cpu_s(server) - before
    return compare(step_s, plain, flow, spent)


def _cpu_s(server: psutil.Process) -> float:
    """Of the server and what it started."""
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(item.user + item.system for item in times)


def in_own_process(steps: int, segment: int, environment: dict[str, str]) -> Memory:
    """`measure_memory` where nothing that ran before is counted. Raises SprawlError with what it ended with."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(_measured, steps, segment, environment).result()
    if isinstance(found, str):
        raise SprawlError(f"the flow of {steps} steps ended with {found}")
    return found


def _measured(steps: int, segment: int, environment: dict[str, str]) -> Memory | str:
    """Errors as text: not all of them survive the way back between processes."""
    try:
        return measure_memory(steps, segment, environment)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def measure_memory(steps: int, segment: int, environment: dict[str, str]) -> Memory:
    from prefect.events.worker import EventsWorker

    from flows import server

    # Steps of no length make events faster than the server writes them down, and it refuses what else is asked of it
    # meanwhile: ask again for as long as that takes. Waiting must not drain Prefect's services: each one that was
    # stopped stays in the process with its connection and its newest events (5 MiB), to be stopped once more at exit.
    server.use(environment | {"PREFECT_CLIENT_MAX_RETRIES": "40"})
    server.quiet_console()
    session, me = IdleSession(steps + 1, 0.0), psutil.Process()
    rss: dict[int, float] = {}
    for end in range(segment, steps + 1, segment):
        drive_flow(session, end, segment)
        EventsWorker.instance().wait_until_empty()  # what waits to be sent is not what the flow keeps
        gc.collect()
        rss[end] = me.memory_info().rss / 2**20
    _, second, *_, last = rss
    growth = 1024 * (rss[last] - rss[second]) / (last - second)
    return Memory(segment, rss, growth if segment == SEGMENT else None)


@contextmanager
def serving() -> Iterator[tuple[dict[str, str], psutil.Process]]:
    """A stack in a directory that is thrown away: the environment that finds its server, and the server."""
    from infra import ports
    from infra.stack import Stack

    with tempfile.TemporaryDirectory(prefix="orchestration-") as folder:
        stack = Stack(Path(folder) / ".sprawl")
        here = Path.cwd()
        try:
            info = stack.up(ports.next_free(4300), wait_s=900.0)
            os.chdir(folder)  # what flow runs leave behind
            yield stack.environment(info.api_url), psutil.Process(info.pid)
        finally:
            os.chdir(here)
            stack.down()


def table(rows: list[Row], memory: Memory) -> str:
    lines = [
        "| step | steps | plain loop | flow | added a step | of the step | median | CPU, flow | CPU, server | once |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = "" if row.share is None else f"{100 * row.share:.2f} %"
        added, median, cpu, server = (
            f"{1000 * value:.1f} ms" for value in (row.added_s, row.median_s, row.cpu_s, row.server_cpu_s)
        )
        lines.append(
            f"| {row.step_s:g} s | {row.steps} | {row.plain_s:.4f} s | {row.flow_s:.4f} s "
            f"| {added} | {share} | {median} | {cpu} | {server} | {row.once_s:.1f} s |"
        )
    readings = ", ".join(f"{step}: {mib:.1f} MiB" for step, mib in memory.rss_mib.items())
    lines += ["", "| steps a flow run | resident after so many steps | growth a step |", "|---|---|---|"]
    growth = "" if memory.kib_a_step is None else f"{memory.kib_a_step:.2f} KiB"
    lines += [f"| {memory.segment} | {readings} | {growth} |"]
    return "\n".join(lines)


@click.command(name="orchestration")
@click.option("--quick", is_flag=True, help="Few steps, and none of 10 s.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(quick: bool, as_json: bool) -> None:
    """Seconds that orchestration adds to a step, and memory that it takes over many."""
    from flows import server

    steps = QUICK_MEMORY_STEPS if quick else MEMORY_STEPS
    with serving() as (environment, process):
        server.use(environment)
        server.quiet_console()
        drive_flow(IdleSession(WARM_UP + 1, 0.0), WARM_UP, WARM_UP)
        rows = []
        for step_s, count in (QUICK if quick else FULL).items():
            rows.append(measure(step_s, count, QUICK_TURNS if quick else TURNS, process))
            click.echo(f"steps of {step_s:g} s: {1000 * rows[-1].added_s:.1f} ms added", err=True)
        memory = in_own_process(steps, min(SEGMENT, steps // 3), environment)
        server.flush()
    (second,) = (row for row in rows if row.step_s == 1.0)
    met = second.share is not None and second.share < TARGET
    if as_json:
        found = {"rows": [asdict(row) for row in rows], "memory": asdict(memory), "met": met}
        click.echo(json.dumps(found))
    else:
        click.echo(table(rows, memory))
        click.echo(f"\ntarget: under {100 * TARGET:g} % at steps of 1 s: {'met' if met else 'not met'}")


if __name__ == "__main__":
    run(main)
