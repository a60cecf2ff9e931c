"""How long a new version takes from the trainer's commit to the islands' answers, and how long it stops them.

    python -m benchmarks.sync --vllm-python .venv-vllm/bin/python   everything, 15 minutes on two busy cores
    python -m benchmarks.sync --quick                               1 and 4 islands, embedded engine: under 60 s
    python -m benchmarks.sync --json                                one JSON object

Real islands, a process each, read a real board over HTTP and poll it every second, as they do with object storage. In
each version about 1 % of the bf16 weights change; it is published as a delta or, in turn, as a whole checkpoint, which
islands fetch whole. A request that waits for the version is answered when it is served; what lies between is
divided into segments (benchmarks.sync_fleet.Step). Then the board's link is limited, and the time to all islands is
held against the bytes. At last an engine's pause for a delta is compared with its pause to read its whole checkpoint
from disk again, in turns, on the same engine, and with beginning anew. Islands, board and publisher share this machine.

vLLM has an environment of its own (`make test-vllm` makes it); without --vllm-python its rows are left out.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from benchmarks.sync_board import Writer
from benchmarks.sync_fleet import SEGMENTS, Fleet, Round, fleet
from benchmarks.sync_island import Plan
from sprawl.errors import SprawlError
from sprawl.policy.fetch import ensure_base

TINY = Path("configs/base/tiny")
LARGE = "smollm2-135m"
SHARE = 0.01
VLLM_ARGS = "--enforce-eager --max-num-seqs 4 --max-model-len 1024 --disable-log-stats"
VLLM_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1"}


@dataclass(frozen=True)
class Size:
    """`versions`: of each kind, in each place."""

    islands: tuple[int, ...]
    versions: int
    large_versions: int


FULL = Size((1, 4, 16), 5, 5)
QUICK = Size((1, 4), 1, 0)


@dataclass(frozen=True)
class Row:
    """Rounds of one kind. Seconds are means over versions and islands; `to_all`, `from_seen` and `pause_median` are
    medians. `board_bytes` and `blob_bytes` (of one island) are a version's."""

    engine: str
    model: str
    islands: int
    rate: float | None
    kind: str
    versions: int
    latency: float
    segments: dict[str, float]
    to_all: float
    from_seen: float
    pause_median: float
    blob_bytes: float
    board_bytes: float
    changed_share: float


@dataclass(frozen=True)
class Pause:
    """Medians of pairs: a delta, then the whole checkpoint read again. Seconds without a token. `restart`, measured
    once: an engine that is a server of its own begins anew on the checkpoint."""

    engine: str
    model: str
    pairs: int
    delta: float
    reload: float
    ratio: float  # the median of the pairs' ratios
    restart: float | None


@dataclass(frozen=True)
class Outcome:
    """`memory`: bytes an island of the tiny policy has for itself."""

    rows: list[Row]
    pauses: list[Pause]
    full_bytes: dict[str, int]
    memory: float


def summarise(engine: str, model: str, rounds: Sequence[Round], rate: float | None) -> Row:
    """One row of rounds of one kind."""
    steps = [step for one in rounds for step in one.steps]
    return Row(
        engine=engine,
        model=model,
        islands=len(rounds[0].steps),
        rate=rate,
        kind="whole" if rounds[0].published.whole else "delta",
        versions=len(rounds),
        latency=statistics.mean(step.latency for step in steps),
        segments={name: statistics.mean(getattr(step, name) for step in steps) for name in SEGMENTS},
        to_all=statistics.median(one.to_all for one in rounds),
        from_seen=statistics.median(one.from_seen for one in rounds),
        pause_median=statistics.median(step.pause for step in steps),
        blob_bytes=statistics.mean(step.bytes for step in steps),
        board_bytes=statistics.mean(one.board_bytes for one in rounds),
        changed_share=statistics.mean(one.published.changed_share for one in rounds),
    )


async def both_kinds(islands: Fleet, versions: int, rate: float | None) -> tuple[list[Round], list[Round]]:
    """Deltas and whole checkpoints in turn, over a link of `rate` bytes a second."""
    islands.link.rate = rate
    deltas, wholes = [], []
    for _ in range(versions):
        deltas.append(await islands.round(whole=False))
        wholes.append(await islands.round(whole=True))
    return deltas, wholes


async def swaps(islands: Fleet, versions: int, engine: str, model: str) -> tuple[list[Round], Pause]:
    """Deltas on one island, each followed by a full reload of its engine."""
    (island,) = islands.islands
    await asyncio.to_thread(island.reload)  # the first touches what later ones find in place; so does the first delta
    await islands.round(whole=False)
    rounds, pairs = [], []
    for _ in range(versions):
        one = await islands.round(whole=False)
        rounds.append(one)
        pairs.append((one.steps[0].pause, await asyncio.to_thread(island.reload)))
    pause = Pause(
        engine=engine,
        model=model,
        pairs=len(pairs),
        delta=statistics.median(delta for delta, _ in pairs),
        reload=statistics.median(reload for _, reload in pairs),
        ratio=statistics.median(delta / reload for delta, reload in pairs),
        restart=await asyncio.to_thread(island.restart) if engine == "vllm" else None,
    )
    return rounds, pause


async def spread(size: Size, rate: float, folder: Path) -> Outcome:
    """The tiny policy on the embedded engine: more and more islands, a free link and a limited one."""
    rows, pauses, memory, full_bytes = [], [], 0.0, 0
    for count in size.islands:
        here = folder / f"tiny-{count}"
        writer = await asyncio.to_thread(Writer, here / "board", TINY, SHARE, "float32")
        full_bytes = writer.full_bytes
        plan = Plan("", "sync", "torch", cache=str(here / "cache") if count == 1 else None)
        async with fleet(writer, count, plan, sys.executable, here / "logs") as islands:
            await islands.round(whole=False)  # not counted: code is compiled, connections are made
            for limit in (None, rate):
                for rounds in await both_kinds(islands, size.versions, limit):
                    rows.append(summarise("torch", "tiny", rounds, limit))
            if count == 1:
                islands.link.rate = None
                pauses.append((await swaps(islands, size.versions, "torch", "tiny"))[1])
            memory = statistics.mean([one.memory() for one in islands.islands])
    return Outcome(rows, pauses, {"tiny": full_bytes}, memory)


async def large(size: Size, base: Path, engine: str, python: str, folder: Path) -> Outcome:
    """One island of the 135M model."""
    here = folder / f"large-{engine}"
    writer = await asyncio.to_thread(Writer, here / "board", base, SHARE, "bfloat16")
    arguments, variables = (VLLM_ARGS, VLLM_VARIABLES) if engine == "vllm" else ("", {})
    plan = Plan("", "sync", engine, arguments, "bfloat16", str(here / "cache"))
    async with fleet(writer, 1, plan, python, here / "logs", variables) as islands:
        deltas, pause = await swaps(islands, size.large_versions, engine, "135M")
        wholes = [await islands.round(whole=True) for _ in range(2)]
    shutil.rmtree(here)
    rows = [summarise(engine, "135M", rounds, None) for rounds in (deltas, wholes)]
    return Outcome(rows, [pause], {"135M": writer.full_bytes}, 0.0)


async def measure(size: Size, rate: float, base: Path | None, vllm_python: str | None, folder: Path) -> Outcome:
    """Everything, one after another. `base`: the 135M model, where it is to be measured."""
    outcome = await spread(size, rate, folder)
    engines = [("torch", sys.executable)] + ([("vllm", vllm_python)] if vllm_python else [])
    for engine, python in engines if base is not None else []:
        assert base is not None
        more = await large(size, base, engine, python, folder)
        outcome = Outcome(
            outcome.rows + more.rows,
            outcome.pauses + more.pauses,
            outcome.full_bytes | more.full_bytes,
            outcome.memory,
        )
    return outcome


def latency_table(rows: Sequence[Row]) -> str:
    """Markdown: the free link. Latencies in seconds, the segments as shares of it."""
    lines = [
        f"| engine | model | islands | published as | latency, s | to all, s | {' | '.join(SEGMENTS)} |",
        f"|{'---|' * (6 + len(SEGMENTS))}",
    ]
    for row in rows:
        if row.rate is None:
            shares = " | ".join(f"{100 * row.segments[name] / row.latency:.1f} %" for name in SEGMENTS)
            lines.append(
                f"| {row.engine} | {row.model} | {row.islands} | {row.kind} | {row.latency:.2f} | {row.to_all:.2f} "
                f"| {shares} |"
            )
    return "\n".join(lines)


def bandwidth_table(rows: Sequence[Row], full_bytes: int) -> str:
    """Markdown: the limited link, deltas against whole checkpoints."""
    lines = [
        "| islands | published as | board bytes a version | / (islands x checkpoint) | bytes / rate, s | fetch, s "
        "| to all, s | to all, once seen, s | of one island |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    limited = [row for row in rows if row.rate is not None]
    for row in sorted(limited, key=lambda row: (row.kind, row.islands)):
        one = next(other for other in limited if (other.kind, other.islands) == (row.kind, 1))
        assert row.rate is not None
        lines.append(
            f"| {row.islands} | {row.kind} | {row.board_bytes / 1e6:.3f} MB "
            f"| {row.board_bytes / (row.islands * full_bytes):.4f} | {row.board_bytes / row.rate:.3f} "
            f"| {row.segments['fetch']:.3f} | {row.to_all:.2f} | {row.from_seen:.2f} "
            f"| {row.from_seen / one.from_seen:.1f} x |"
        )
    return "\n".join(lines)


def pause_table(pauses: Sequence[Pause]) -> str:
    """Markdown."""
    lines = [
        "| engine | model | pairs | pause for a delta | reload in place | delta / reload | restart | delta / restart |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in pauses:
        restart = ("", "") if one.restart is None else (f"{one.restart:.1f} s", f"{one.delta / one.restart:.3f}")
        lines.append(
            f"| {one.engine} | {one.model} | {one.pairs} | {1e3 * one.delta:.1f} ms | {1e3 * one.reload:.1f} ms "
            f"| {one.ratio:.2f} | {' | '.join(restart)} |"
        )
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="1 and 4 islands on the embedded engine: under 60 s.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--vllm-python",
    type=click.Path(exists=True, dir_okay=False),
    envvar="SPRAWL_VLLM_PYTHON",
    show_envvar=True,
    help="Interpreter of an environment with vLLM.",
)
@click.option(
    "--models",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("models"),
    show_default=True,
    help="Where the 135M model is; fetched once.",
)
@click.option("--rate", type=click.FloatRange(min=0.01), default=10.0, show_default=True,
              help="MB a second of the limited link.")  # fmt: skip
def sync(quick: bool, as_json: bool, vllm_python: str | None, models: Path, rate: float) -> None:
    """Measure the way of a version from the trainer's commit to the islands' answers."""
    torch.set_num_threads(1)
    size = QUICK if quick else FULL
    try:
        base = None if quick else ensure_base(LARGE, models, lambda line: click.echo(line, err=True))
        with tempfile.TemporaryDirectory() as folder:
            outcome = asyncio.run(measure(size, rate * 1e6, base, vllm_python, Path(folder)))
    except SprawlError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(asdict(outcome)))
        return
    share = statistics.mean(row.changed_share for row in outcome.rows if row.kind == "delta")
    click.echo(f"{100 * share:.2f} % of the bf16 weights change in a version; free link\n")
    click.echo(latency_table(outcome.rows))
    tiny = outcome.full_bytes["tiny"]
    click.echo(f"\nLink of {rate:g} MB/s, checkpoint of {tiny / 1e6:.2f} MB ({tiny / rate / 1e6:.2f} s of it)\n")
    click.echo(bandwidth_table(outcome.rows, tiny))
    click.echo(f"\n{pause_table(outcome.pauses)}\n\nAn island of the tiny policy has {outcome.memory / 1e6:.0f} MB.")
    if not quick and vllm_python is None:
        click.echo("vLLM left out: name its interpreter with --vllm-python (`make test-vllm` makes an environment)")


if __name__ == "__main__":
    sync()
