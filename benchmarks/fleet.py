"""A fleet's controller against spot markets: the real one, with a simulated cloud and a simulated run.

    python -m benchmarks.fleet [--quick] [--json]
    git clone https://github.com/skypilot-org/spot-traces
    python -m benchmarks.fleet --traces spot-traces/availability/16-node/aws-08-27-2023     published traces

What runs is `sprawl.fleet.controller.Controller` with its policy, its log and the board's records. Simulated are the
machines (asked for, starting, taken, looked for again: `sprawl.fleet.fake`), time, and a trainer that needs a batch a
step, each of so many island-seconds.

Without --traces the market is generated: three zones of 16 machines, each switching between none and some with the mean
times that the traces of Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines" (NSDI 2024,
github.com/skypilot-org/spot-traces, 16 V100 nodes on AWS, August 2023) have: see `RATES`. Those traces carry no licence
and are therefore not shipped.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from benchmarks.command import run as run_from_shell
from benchmarks.idle import step_record
from sprawl.board.ledger import Ledger
from sprawl.board.records import EventRecord, RunRecord, StepRecord
from sprawl.board.store import MemoryStore
from sprawl.errors import SprawlError
from sprawl.fleet.controller import Controller
from sprawl.fleet.fake import FakeCloud
from sprawl.fleet.reap import reap
from sprawl.fleet.settings import FleetSettings

RUN = "simulated"
TICK_S = 10.0
LOOK_S = 30.0
BUSY_S = 60.0  # the trainer's own part of a step
REVERSAL_S = 3600.0  # a change against the one before, within this time, is an oscillation
RATES = ((208.0, 121.0), (105.0, 132.0), (114.0, 147.0))
"""Minutes that a zone has machines, and has none: means of the three published traces named above."""
ZONE = 16


@dataclass(frozen=True)
class Scenario:
    """capacity: machines that can be had at a time (seconds); work: island-seconds of a batch at a time (share of the
    run done)."""

    name: str
    hours: float
    capacity: Callable[[float], int]
    work: Callable[[float], float]


@dataclass(frozen=True)
class Outcome:
    """Shares of the time from the first batch to the last. `idle`: the trainer waited; `unavoidable`: it would have
    with as many islands as could be had, at once and for nothing. `surplus`: paid machine-time beyond what a fleet of
    exactly the needed size would have taken. Changes of the target by an hour; `reversals`: changes against the one
    before within an hour of it. `left`: machines that cost money after the end."""

    scenario: str
    hours: float
    idle: float
    unavoidable: float
    surplus: float
    most: int
    changes_per_hour: float
    reversals_per_hour: float
    preempted_per_hour: float
    left: int


@dataclass
class Trainer:
    """Trains on a batch while the next one is sampled."""

    ledger: Ledger | None
    random: random.Random
    done: int = 0
    progress: float = 0.0  # island-seconds of the batch that is being sampled
    asked_at: float = 0.0
    ready_at: float | None = None
    busy_until: float | None = None
    waited: float = 0.0
    began: float | None = None
    _step_began: float = 0.0
    _shares: dict[str, int] = field(default_factory=dict)  # ticks that each island sampled
    _noise: float = field(default=1.0)

    def advance(self, now: float, serving: int, work: float) -> None:
        """One tick that ends at `now`."""
        if self.ready_at is None:
            self.progress += serving * TICK_S
            for number in range(serving):
                self._shares[f"island-{number}"] = self._shares.get(f"island-{number}", 0) + 1
            if self.progress >= work * self._noise:
                self.ready_at = now
        if self.busy_until is not None and now < self.busy_until:
            return
        if self.ready_at is None:
            if self.began is not None:
                self.waited += TICK_S
            return
        if self.busy_until is not None:
            self._finish(now)
        self.began = self.began if self.began is not None else now
        # It trains on this batch, islands go on with the next one.
        self._step_began = now
        self.busy_until = now + BUSY_S * self.random.lognormvariate(0, 0.1)
        self.asked_at, self.ready_at, self.progress, self._shares = now, None, 0.0, {}
        self._noise = self.random.lognormvariate(0, 0.15)

    def _finish(self, now: float) -> None:
        self.done += 1
        if self.ledger is None:
            return
        assert self.busy_until is not None
        assert self.ready_at is not None
        wait = max(0.0, now - self.busy_until)
        seconds = {"total": now - self._step_began, "rollout_wait": wait, "rollout": self.ready_at - self.asked_at}
        self.ledger.write_step(_record(self.done, now, seconds, self._shares))


def simulate(scenario: Scenario, settings: FleetSettings, seed: int = 0) -> Outcome:
    """The whole life of a run's fleet."""
    store = MemoryStore()
    ledger = Ledger(store, RUN)
    end = scenario.hours * 3600
    config = {"name": "simulated", "steps": 10**6, "policy": {"base": "x"}}
    ledger.create_run(
        RunRecord(run_id=RUN, created_at=0.0, config=config, base_digest="0", parameters=1, sprawl_version="0")
    )
    cloud = FakeCloud(store, RUN, appear_s=20, boot_s=300, drain_s=30, end_s=60, settle_s=60)
    controller = Controller(store, RUN, cloud, settings, now=lambda: cloud.now)
    trainer, ideal = Trainer(ledger, random.Random(seed)), Trainer(None, random.Random(seed))
    targets: list[tuple[float, int]] = []
    needed_s, taken, most, looked = 0.0, 0, 0, -LOOK_S
    while cloud.now < end:
        cloud.capacity = scenario.capacity(cloud.now)
        held = sum(machine.phase in ("starting", "running") for machine in cloud.there.values())
        taken += max(0, held - cloud.capacity)
        cloud.advance(TICK_S)
        work = scenario.work(cloud.now / end)
        trainer.advance(cloud.now, cloud.serving, work)
        if trainer.began is not None:
            ideal.advance(cloud.now, min(cloud.capacity, settings.max_islands), work)
            needed_s += work / BUSY_S * TICK_S
        most = max(most, cloud.paid_for)
        if cloud.now - looked >= LOOK_S:
            looked = cloud.now
            target = controller.look().target
            if not targets or target != targets[-1][1]:
                targets.append((cloud.now, target))
    paid = cloud.paid_s
    ledger.write_event(EventRecord(kind="finish", at=cloud.now, step=10**6, message="the end"))
    for _ in range(40):
        cloud.advance(LOOK_S)
        if not controller.look().open:
            break
    reap(store, RUN, cloud, now=lambda: cloud.now, sleep=cloud.advance)
    span = max(1.0, end - (trainer.began or 0.0))
    hours = span / 3600
    return Outcome(
        scenario.name,
        scenario.hours,
        trainer.waited / span,
        ideal.waited / span,
        paid / max(1.0, needed_s) - 1,
        most,
        (len(targets) - 1) / hours,
        reversals(targets) / hours,
        taken / hours,
        len(cloud.there),
    )


def reversals(targets: Sequence[tuple[float, int]]) -> int:
    """Changes against the direction of the change before, within REVERSAL_S of it."""
    count = 0
    for (_, a), (at, b), (later, c) in zip(targets, targets[1:], targets[2:], strict=False):
        count += (b - a) * (c - b) < 0 and later - at < REVERSAL_S
    return count


def generated(seed: int, hours: float) -> Callable[[float], int]:
    """Capacity of three zones that come and go as `RATES` says; a zone that comes has 1 to 16 machines."""
    random_ = random.Random(seed)
    zones: list[list[tuple[float, int]]] = []  # (until, machines)
    for up, down in RATES:
        spans, now, there = [], 0.0, random_.random() < up / (up + down)
        while now < hours * 3600:
            now += random_.expovariate(1 / (60 * (up if there else down)))
            spans.append((now, random_.choice((ZONE, ZONE, random_.randint(1, ZONE))) if there else 0))
            there = not there
        zones.append(spans)
    return lambda now: sum(next((count for until, count in spans if until > now), 0) for spans in zones)


def published(folder: Path) -> tuple[Callable[[float], int], float]:
    """The zones of a folder of traces together, and how many hours all of them cover. Raises SprawlError."""
    zones = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text())
            zones.append((float(data["metadata"]["gap_seconds"]), [int(value) for value in data["data"]]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SprawlError(f"{path} is no trace: {error}", "see github.com/skypilot-org/spot-traces") from None
    if not zones:
        raise SprawlError(f"no traces in {folder}", "see github.com/skypilot-org/spot-traces")
    hours = min(gap * len(values) for gap, values in zones) / 3600
    return lambda now: sum(values[min(int(now / gap), len(values) - 1)] for gap, values in zones), hours


def scenarios(quick: bool, market: Callable[[float], int], hours: float) -> list[Scenario]:
    """Constant and changing load with machines enough, a drought, and the market."""
    short = 4.0 if quick else 12.0

    def constant(done: float) -> float:
        return 4.0 * BUSY_S

    def changing(done: float) -> float:
        return BUSY_S * (2.0 if done < 1 / 3 else 6.0 if done < 2 / 3 else 3.0)

    drought = (short * 3600 * 0.4, short * 3600 * 0.6)
    return [
        Scenario("constant load", short, lambda now: 100, constant),
        Scenario("changing load", short, lambda now: 100, changing),
        Scenario("a drought", short, lambda now: 0 if drought[0] < now < drought[1] else 100, constant),
        Scenario("spot market", hours, market, constant),
        Scenario("spot market, changing load", hours, market, changing),
    ]


def table(rows: Sequence[Outcome]) -> str:
    """Markdown."""
    lines = [
        "| scenario | hours | trainer idle | unavoidable | paid beyond need | most machines | changes/h | reversals/h "
        "| preempted/h | left |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shares = f"{row.idle:.1%} | {row.unavoidable:.1%} | {row.surplus:+.0%} | {row.most}"
        rates = f"{row.changes_per_hour:.2f} | {row.reversals_per_hour:.2f} | {row.preempted_per_hour:.1f}"
        lines.append(f"| {row.scenario} | {row.hours:.0f} | {shares} | {rates} | {row.left} |")
    return "\n".join(lines)


def _record(step: int, now: float, seconds: dict[str, float], islands: dict[str, int]) -> StepRecord:
    measured = {"finished_at": now, "staleness": 1.0, "staleness_max": 1, "seconds": seconds, "islands": islands}
    return step_record(step).model_copy(update=measured)


@click.command(name="fleet", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--traces", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of spot traces.")
@click.option("--hours", type=click.FloatRange(1, 400), default=None, help="Of the spot market [48; quick: 6].")
@click.option("--max-islands", type=click.IntRange(1), default=12, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--quick", is_flag=True, help="Shorter runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(traces: Path | None, hours: float | None, max_islands: int, seed: int, quick: bool, as_json: bool) -> None:
    """Simulate a fleet's controller: does it oscillate, how long does the trainer wait, is anything left behind?"""
    span = hours or (6.0 if quick else 48.0)
    if traces is not None:
        market, covered = published(traces)
        span = min(span, covered)
    else:
        market = generated(seed, span)
    settings = FleetSettings(max_islands=max_islands)
    rows = [simulate(scenario, settings, seed) for scenario in scenarios(quick, market, span)]
    source = str(traces.name) if traces else f"generated from published rates, seed {seed}"
    if as_json:
        click.echo(json.dumps({"market": source, "rows": [asdict(row) for row in rows]}))
    else:
        click.echo(f"market: {source}\n\n{table(rows)}")


if __name__ == "__main__":
    run_from_shell(main)
