"""A discrete-event simulation of one step's version on its way to 10,000 islands in 12 regions, and what it costs.

    python -m benchmarks.fanout_model --measured FILE                  of `benchmarks.fanout --json > FILE`
    python -m benchmarks.fanout_model --measured FILE --prices FILE    other prices: JSON, the fields of Prices
    python -m benchmarks.fanout_model --measured FILE --quick --json

Measured: how long a request takes at the store and at a mirror, how many requests and bytes a second of a mirror's
processor is good for (it has one for itself here). Assumed: round trips between regions, bandwidths, prices (`World`,
`Prices`). Every island, mirror, request and transfer is simulated; transfers that share a link share it fairly. A
mirror sends an object when it has it whole, as the real one does. Decoding and swapping are not part of the latency.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import numpy as np
from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class Measured:
    """From benchmarks.fanout: unloaded seconds of a request, and what one mirror process gets through."""

    store_request_s: float
    store_first_byte_s: float
    mirror_request_s: float
    mirror_requests_per_s: float
    mirror_bytes_per_s: float


class Prices(BaseModel):
    """List prices in dollars, before discounts and free tiers: AWS, us-east-1, as quoted by the pages that
    docs/results.md names (looked up 2026-11-30). Check them, or bring your own with --prices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    internet_gb: float = Field(0.09, ge=0, description="Out to the internet: islands at another provider.")
    inter_region_gb: float = Field(0.02, ge=0, description="Between regions of one provider.")
    get_per_1000: float = Field(0.0004, ge=0, description="GET requests of the object store, also those for nothing.")
    mirror_hour: float = Field(0.5, ge=0, description="A machine with 25 Gbit/s for a mirror (assumed).")


@dataclass(frozen=True)
class World:
    """Assumptions. Round trips from the board's region (the first) in seconds; bytes per second."""

    round_trips_s: tuple[float, ...] = (
        *(0.002, 0.015, 0.065, 0.070, 0.080, 0.090),
        *(0.120, 0.150, 0.160, 0.190, 0.210, 0.220),
    )
    region_round_trip_s: float = 0.001
    island_rate: float = 1.25e9  # 10 Gbit/s
    stream_rate: float = 100e6  # of one download between regions
    board_rate: float = 125e9  # 1 Tbit/s for all readers of the bucket together
    mirror_link: float = 3.125e9  # 25 Gbit/s
    step_s: float = 60.0
    poll_s: float = 1.0  # an island, without a mirror
    mirror_poll_s: float = 0.25
    check_s: float = 15.0


@dataclass(frozen=True)
class Outcome:
    """One row. Dollars a step: `inter_region` when all islands are with the board's provider, `internet` when those
    outside its region are elsewhere; `mirrors` for their machines."""

    way: str
    delta_mb: float
    islands: int
    mirrors: int
    p50_s: float
    p99_s: float
    egress_gb: float
    store_requests: int
    inter_region: float
    internet: float
    requests: float
    machines: float


class Clock:
    """Events in the order of their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


@dataclass
class _Class:
    """Transfers over a link that have the same limit of their own. `served`: bytes that each active one has had since
    the beginning of time; one is done when that reaches its mark."""

    limit: float
    served: float = 0.0
    rate: float = 0.0
    waiting: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)


class Link:
    """A link of `capacity` bytes per second, shared max-min fairly by transfers that also have limits of their own."""

    def __init__(self, clock: Clock, capacity: float) -> None:
        self._clock = clock
        self._capacity = capacity
        self._classes: dict[float, _Class] = {}
        self._updated = 0.0
        self._count = 0
        self._plan = 0  # of the next completion; older ones are void

    def send(self, size: float, limit: float, done: Callable[[], None]) -> None:
        self._advance()
        group = self._classes.setdefault(limit, _Class(limit))
        self._count += 1
        heapq.heappush(group.waiting, (group.served + size, self._count, done))
        self._replan()

    def _advance(self) -> None:
        elapsed = self._clock.now - self._updated
        for group in self._classes.values():
            group.served += group.rate * elapsed
        self._updated = self._clock.now

    def _replan(self) -> None:
        """Share the link anew and find out when the next transfer is done."""
        left, active = self._capacity, [g for g in self._classes.values() if g.waiting]
        count = sum(len(group.waiting) for group in active)
        for group in sorted(active, key=lambda group: group.limit):
            group.rate = min(group.limit, left / count)
            left -= group.rate * len(group.waiting)
            count -= len(group.waiting)
        self._plan += 1
        plan = self._plan
        if active:
            first = min((g.waiting[0][0] - g.served) / g.rate for g in active)
            self._clock.at(self._clock.now + max(0.0, first), lambda: self._finish(plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        finished = []
        for group in self._classes.values():
            while group.waiting and group.waiting[0][0] <= group.served + 1e-3:
                finished.append(heapq.heappop(group.waiting)[2])
        self._replan()
        for done in finished:
            done()


class _Queue:
    """A mirror's processor: requests one after another."""

    def __init__(self, clock: Clock, per_second: float) -> None:
        self._clock, self._each, self._free = clock, 1 / per_second, 0.0

    def serve(self, done: Callable[[], None]) -> None:
        self._free = max(self._free, self._clock.now) + self._each
        self._clock.at(self._free, done)


def direct(found: Measured, world: World, islands: int, size: float, seed: int) -> list[float]:
    """Seconds from commit to delta in hand, an island each, when all of them poll the store."""
    clock, random_, times = Clock(), random.Random(seed), []
    board = Link(clock, world.board_rate)
    for island in range(islands):
        trip = world.round_trips_s[island % len(world.round_trips_s)]
        limit = world.island_rate if island % len(world.round_trips_s) == 0 else world.stream_rate
        told = random_.uniform(0, world.poll_s) + trip + found.store_request_s

        def ask(limit: float = limit) -> None:
            board.send(size, limit, lambda: times.append(clock.now))

        clock.at(told + trip + found.store_first_byte_s, ask)
    clock.run()
    return times


def mirrored(
    found: Measured, world: World, islands: int, size: float, seed: int, *, per_region: int, signed: bool
) -> list[float]:
    """The same with mirrors in every region."""
    clock, random_, times = Clock(), random.Random(seed), []
    board = Link(clock, world.board_rate)
    regions = len(world.round_trips_s)
    near = world.region_round_trip_s
    rate = min(world.mirror_link, found.mirror_bytes_per_s)

    def mirror(region: int, readers: int) -> None:
        trip = world.round_trips_s[region]
        link, processor = Link(clock, rate), _Queue(clock, found.mirror_requests_per_s)
        limit = world.island_rate if region == 0 else world.stream_rate
        waiting: list[Callable[[], None]] = []
        state = {"fetching": False, "held": False}

        def send() -> None:
            link.send(size, world.island_rate, lambda: times.append(clock.now + near / 2))

        def have() -> None:
            state["held"] = True
            for each in waiting:
                each()

        def asked_for_blob() -> None:
            if state["held"]:
                send()
                return
            waiting.append(send)
            if not state["fetching"]:
                state["fetching"] = True
                clock.at(
                    clock.now + trip + found.store_first_byte_s,
                    lambda: board.send(size, min(limit, world.mirror_link), have),
                )

        def told() -> None:
            own_look = 0.0 if signed else trip + found.store_request_s  # the manifest from the board
            clock.at(clock.now + near + own_look, lambda: processor.serve(asked_for_blob))

        def seen() -> None:
            for _ in range(readers):
                processor.serve(told)

        clock.at(random_.uniform(0, world.mirror_poll_s) + trip + found.store_request_s, seen)

    shares = [islands // (regions * per_region)] * (regions * per_region)
    for extra in range(islands - sum(shares)):
        shares[extra] += 1
    for number, readers in enumerate(shares):
        mirror(number % regions, readers)
    clock.run()
    return times


def outcomes(
    found: Measured,
    world: World | None = None,
    prices: Prices | None = None,
    *,
    islands: int = 10_000,
    sizes_mb: tuple[float, ...] = (500.0, 50.0),
    per_region: tuple[int, ...] = (1, 4, 16),
    signed: bool = False,
    seed: int = 0,
) -> list[Outcome]:
    """Without mirrors, and with some in every region, for every size of a delta."""
    world, prices = world or World(), prices or Prices()
    rows = []
    regions = len(world.round_trips_s)
    for size_mb in sizes_mb:
        size = size_mb * 1e6
        for count in (0, *per_region):
            if count == 0:
                times = direct(found, world, islands, size, seed)
                # Polls all step long, and the delta itself.
                requests = round(islands * (world.step_s / world.poll_s + 1))
                outside = islands - -(-islands // regions)
            else:
                times = mirrored(found, world, islands, size, seed, per_region=count, signed=signed)
                checks = world.step_s / world.check_s + (0 if signed else 1)
                polls = world.step_s / world.mirror_poll_s + 1
                requests = round(islands * checks + regions * count * polls)
                outside = (regions - 1) * count
            p50, p99 = np.percentile(times, [50, 99])
            egress = outside * size / 1e9
            rows.append(
                Outcome(
                    way="store alone" if count == 0 else f"{count} a region",
                    delta_mb=size_mb,
                    islands=islands,
                    mirrors=count * regions,
                    p50_s=float(p50),
                    p99_s=float(p99),
                    egress_gb=egress,
                    store_requests=requests,
                    inter_region=egress * prices.inter_region_gb,
                    internet=egress * prices.internet_gb,
                    requests=requests / 1000 * prices.get_per_1000,
                    machines=count * regions * prices.mirror_hour * world.step_s / 3600,
                )
            )
    return rows


def table(rows: list[Outcome]) -> str:
    """Markdown."""
    lines = [
        "| delta | mirrors | latency p50 | p99 | egress a step | $ inter-region | $ internet | store requests "
        "| $ for them | $ for mirrors |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.delta_mb:g} MB | {row.way} | {row.p50_s:.1f} s | {row.p99_s:.1f} s | {row.egress_gb:,.1f} GB | "
        f"{row.inter_region:.2f} | {row.internet:.2f} | {row.store_requests:,} | {row.requests:.2f} | "
        f"{row.machines:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--measured", "measured_file", type=_FILE, required=True, help="What `benchmarks.fanout --json` printed.")
@click.option("--prices", "prices_file", type=_FILE, default=None, help="Other prices: JSON with fields of Prices.")
@click.option(
    "--board-gbit", type=click.FloatRange(min=1), default=1000, show_default=True, help="What a bucket sends."
)
@click.option("--quick", is_flag=True, help="1,000 islands.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(measured_file: Path, prices_file: Path | None, board_gbit: float, quick: bool, as_json: bool) -> None:
    """Simulate how a version reaches 10,000 islands in 12 regions, and its price."""
    try:
        found = Measured(**json.loads(measured_file.read_text())["measured"])
        prices = Prices.model_validate_json(prices_file.read_text()) if prices_file else Prices()
    except (ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"not what was expected: {error}") from None
    rows = outcomes(found, World(board_rate=board_gbit * 1e9 / 8), prices, islands=1000 if quick else 10_000)
    if as_json:
        click.echo(json.dumps({"prices": prices.model_dump(), "simulated": [asdict(row) for row in rows]}))
    else:
        click.echo(table(rows))


if __name__ == "__main__":
    main()
