"""What it costs to join late: keyframe and chain, the chain alone, or one merged delta.

    python -m benchmarks.late_join                128 MiB of bf16, 64 versions (minutes)
    python -m benchmarks.late_join --quick        24 MiB, 24 versions: under 60 s
    python -m benchmarks.late_join --json         one JSON object

A run of Adam-like steps is published on a board in a temporary directory. For joiners that hold nothing, the base
model, or a version k steps old, every route is taken and its result compared with the published root digest. Columns:
bytes to fetch over the state's bytes; seconds of work on this machine, one thread (read, decode, patch, hash), over
those of the route from the keyframe; and seconds at 1 Gbit/s with that work added. `chosen` is the planner's route.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
import torch

from sprawl.board.commit import CommitOptions
from sprawl.board.manifest import KEYFRAME
from sprawl.board.merged import merge, read_merged
from sprawl.board.publisher import Publisher
from sprawl.board.reader import Served, VersionReader
from sprawl.board.routes import BANDWIDTH, find
from sprawl.board.store import Store, open_store
from sprawl.delta.state import State, clone_state

RUN = "late"


@dataclass(frozen=True)
class Row:
    joiner: str
    behind: int | None  # versions between what it holds and the target; None when it holds nothing
    route: str
    hops: int
    bytes: int
    bytes_over_state: float
    work_seconds: float
    seconds_at_1_gbit: float
    chosen: bool


@dataclass(frozen=True)
class Size:
    elements: int
    versions: int
    keyframe_every: int
    away: tuple[int, ...]


FULL = Size(64 << 20, 64, 20, (2, 8, 31, 62))
QUICK = Size(12 << 20, 24, 8, (2, 6, 22))


def weights(elements: int, generator: torch.Generator) -> State:
    """fp32 masters: matrices whose magnitudes spread as those of a language model do (log-normal scale a row)."""
    rows = elements // 8 // 4096
    return {
        f"layer{i}": torch.randn(rows, 4096, generator=generator)
        * 0.02
        * torch.exp(0.5 * torch.randn(rows, 1, generator=generator))
        for i in range(8)
    }


def publish_run(store: Store, size: Size, rate: float) -> float:
    """Publish the run; returns the mean share of bf16 weights that change in a step.

    The step is Adam's at a constant rate: +-rate times a slowly turning direction, so that positions recur.
    """
    generator = torch.Generator().manual_seed(0)
    masters = weights(size.elements, generator)
    momentum = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in masters.items()}
    writer = Publisher(store, RUN, CommitOptions(keyframe_every=size.keyframe_every, dtype="bfloat16"))
    shares = []
    for version in range(size.versions):
        receipt = writer.publish(version, version, {name: tensor.bfloat16() for name, tensor in masters.items()})
        shares.append(receipt.changed_share)
        for name, tensor in masters.items():
            direction = momentum[name]
            direction.mul_(0.9).add_(torch.randn(tensor.shape, generator=generator), alpha=0.436)
            tensor.add_(direction.clamp(-1, 1), alpha=rate)
    return float(np.mean(shares[1:]))


def timed(reader: VersionReader, start: Served | None, hops: Sequence[tuple[int | None, int]], root: str) -> float:
    """Seconds to take these hops, (base, version) each, base None for a keyframe; the result is checked."""
    served = None if start is None else Served(start.version, clone_state(start.state), dict(start.digests), start.root)
    began = time.perf_counter()
    for base, version in hops:
        if base is None:
            served = reader.keyframe(version)
            continue
        assert served is not None
        if version == base + 1:
            prepared = reader.prepare_delta(served, reader.require(version))
        else:
            record = read_merged(reader, base, version)
            assert record is not None
            prepared = reader.prepare_merged(served, record)
        reader.commit(served, prepared)
    seconds = time.perf_counter() - began
    if served is None or served.root != root:
        raise AssertionError("a route arrived at another state")
    return seconds


def measure(store: Store, size: Size) -> list[Row]:
    """Every route of every joiner."""
    reader = VersionReader(store, RUN)
    target = size.versions - 1
    manifest = reader.require(target)
    keyframe = manifest.keyframe_version
    from_keyframe: list[tuple[int | None, int]] = [(None, keyframe)]
    from_keyframe += [(version - 1, version) for version in range(keyframe + 1, target + 1)]
    rows: list[Row] = []
    joiners: list[tuple[str, int | None]] = [("nothing", None), ("base model", 0)]
    joiners += [(f"{away} behind", target - away) for away in size.away]
    for _, base in joiners:
        if base is not None and target - base > 1:
            merge(reader, base, target)
    for joiner, base in joiners:
        start = None if base is None else reader.materialise(base)
        chosen = [(hop.base, hop.version) for hop in find(reader, base, target, set()).hops]
        routes = {"keyframe + chain": from_keyframe}
        if base is not None:
            routes["chain"] = [(version - 1, version) for version in range(base + 1, target + 1)]
            routes["merged delta"] = [(base, target)]
        if chosen not in routes.values():
            routes["keyframe + merged delta" if base is None else "mixed"] = chosen
        for route, hops in routes.items():
            before = reader.bytes_read
            work = timed(reader, start, hops, manifest.root_digest)
            count = reader.bytes_read - before
            rows.append(
                Row(
                    joiner=joiner,
                    behind=None if base is None else target - base,
                    route=route,
                    hops=len(hops),
                    bytes=count,
                    bytes_over_state=count / manifest.full_bytes,
                    work_seconds=work,
                    seconds_at_1_gbit=count / BANDWIDTH + work,
                    chosen=hops == chosen,
                )
            )
    return rows


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="A small run: under 60 s.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--rate", type=float, default=5e-7, show_default=True, help="Learning rate of the steps.")
def late_join(quick: bool, as_json: bool, rate: float) -> None:
    """Measure what it costs to join a run late."""
    torch.set_num_threads(1)
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(str(Path(folder) / "board"), create=True)
        share = publish_run(store, size, rate)
        rows = measure(store, size)
        reader = VersionReader(store, RUN)
        full = reader.require(0).full_bytes
        keyframe_bytes = reader.require(0).bytes_of(KEYFRAME)
    best = {row.joiner: min(r.seconds_at_1_gbit for r in rows if r.joiner == row.joiner) for row in rows}
    regret = max(row.seconds_at_1_gbit / best[row.joiner] for row in rows if row.chosen)
    chain = next(row for row in rows if row.joiner == "base model" and row.route == "chain")
    summary = {
        "state_bytes": full,
        "keyframe_bytes": keyframe_bytes,
        "versions": size.versions,
        "changed_share": share,
        "pass_rate_bytes_per_second": full * chain.hops / chain.work_seconds,
        "chosen_over_best": regret,
    }
    if as_json:
        click.echo(json.dumps({**summary, "rows": [asdict(row) for row in rows]}))
        return
    click.echo(
        f"{full / 2**20:.0f} MiB of bf16, {size.versions} versions, {100 * share:.2f} % changed in each; one pass of "
        f"decode, patch and hash at {summary['pass_rate_bytes_per_second'] / 1e9:.2f} GB/s; the planner's routes take "
        f"at most {regret:.2f} x the best"
    )
    click.echo(
        "\n| joiner holds | route | hops | bytes / state | work | at 1 Gbit/s | chosen |\n|---|---|---|---|---|---|---|"
    )
    for row in rows:
        base = next(r for r in rows if r.joiner == row.joiner and r.route == "keyframe + chain")
        click.echo(
            f"| {row.joiner} | {row.route} | {row.hops} | {row.bytes_over_state:.4f} | "
            f"{row.work_seconds / base.work_seconds:.2f} x | {row.seconds_at_1_gbit / base.seconds_at_1_gbit:.2f} x | "
            f"{'yes' if row.chosen else ''} |"
        )


if __name__ == "__main__":
    late_join()
