"""Many readers of one board: an object store alone, and with a mirror in front of it.

    python -m benchmarks.fanout                1,000 readers, 6 versions, three ways (about 7 minutes)
    python -m benchmarks.fanout --quick        100 readers, 4 versions: under 60 s
    python -m benchmarks.fanout --json         one JSON object

A real SeaweedFS server, a real `sprawl mirror` process, real versions published with the library's publisher. Readers
poll as islands on object storage do (every second), or hold one request open at the mirror. `latency` is from the
commit of a version to its delta, checked, in a reader's hands. `store` counts what readers and mirror asked of the
object store, the publisher's own requests left out. What a mirror gets through is counted per second of its processor
time, as readers, store and mirror share this machine. The measured times then feed the simulation of
benchmarks.fanout_model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import httpx
import numpy as np
import torch
from blake3 import blake3

from benchmarks import fanout_model
from benchmarks.fanout_probe import Probe, probe
from benchmarks.fanout_readers import Plan, Seen, Signer
from benchmarks.seaweed import serving
from sprawl.board import keys
from sprawl.board.commit import CommitOptions
from sprawl.board.publisher import Publisher
from sprawl.board.store import Store, open_store
from sprawl.delta.state import State
from sprawl.errors import SprawlError
from sprawl.mirror.registry import mirrors

RUN = "fanout"
BUCKET = "boards"
BULK_BYTES = 16 << 20
CHECK_S = 15.0  # as MirroredStore


@dataclass(frozen=True)
class Size:
    readers: int
    processes: int
    versions: int
    interval_s: float
    poll_s: float = 1.0


FULL = Size(readers=1000, processes=2, versions=6, interval_s=15.0)
QUICK = Size(readers=100, processes=1, versions=4, interval_s=1.5)


@dataclass(frozen=True)
class Row:
    way: str
    readers: int
    versions: int
    delivered: int
    p50_s: float
    p99_s: float
    max_s: float
    store_requests_per_second: float
    store_requests_per_version: float
    store_bytes_per_version: float
    reader_requests_per_second: float
    errors: int
    wrong: int


class Writer:
    """Publishes versions of a small model: about 1 % of its weights move in each."""

    def __init__(self, store: Store) -> None:
        self._publisher = Publisher(store, RUN, CommitOptions(keyframe_every=1_000_000, dtype="bfloat16"))
        self._generator = torch.Generator().manual_seed(0)
        self._masters = {f"layer{i}": torch.randn(512, 1024, generator=self._generator) * 0.02 for i in range(8)}
        self.next = 0
        self.publish()

    def publish(self) -> None:
        state: State = {name: tensor.bfloat16() for name, tensor in self._masters.items()}
        self._publisher.publish(self.next, self.next, state)
        self.next += 1
        for tensor in self._masters.values():
            tensor += 5e-7 * torch.randn(tensor.shape, generator=self._generator).sign()


@contextlib.contextmanager
def mirror_process(board: str, store: Store, folder: Path) -> Iterator[tuple[str, int]]:
    """A mirror of the board; yields its URL and process id."""
    argv = [sys.executable, "-m", "sprawl.cli", "mirror", board, "--cache", str(folder), "--exit-with-parent"]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    try:
        for _ in range(300):
            if found := [record for record in mirrors(store) if record.pid == process.pid]:
                break
            if process.poll() is not None:
                raise SprawlError("the mirror did not start")
            time.sleep(0.1)
        else:
            raise SprawlError("the mirror did not register")
        yield found[0].url, process.pid
    finally:
        process.terminate()
        process.wait()


def store_load(mirror: str) -> tuple[int, int]:
    """Requests and bytes that the mirror asked of the object store so far."""
    values = dict(line.rsplit(" ", 1) for line in httpx.get(f"{mirror}/metrics").text.splitlines() if line[0] != "#")
    return int(values["sprawl_mirror_board_requests_total"]), int(values["sprawl_mirror_board_bytes_total"])


def measure(way: str, size: Size, writer: Writer, plan: Plan) -> Row:
    """Start the readers, publish versions at a steady pace, add up what they saw."""
    shares = [size.readers // size.processes] * size.processes
    shares[0] += size.readers - sum(shares)
    plans = [{**asdict(plan), "readers": share} for share in shares]
    argv = [sys.executable, "-m", "benchmarks.fanout_readers"]
    running = [subprocess.Popen([*argv, json.dumps(p)], stdout=subprocess.PIPE, text=True) for p in plans]
    try:
        for process in running:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise SprawlError("a reader process did not start")
        before = store_load(plan.mirror) if plan.mirror else (0, 0)
        started = time.monotonic()
        time.sleep(size.poll_s + 1.0)  # every reader is waiting by then
        for number in range(size.versions):
            writer.publish()
            pause = started + 2.0 + (number + 1) * size.interval_s - time.monotonic()
            time.sleep(max(0.0, pause) if number + 1 < size.versions else 0.0)
        seen = [Seen(**json.loads(process.communicate(timeout=180)[0])) for process in running]
        elapsed = time.monotonic() - started
        after = store_load(plan.mirror) if plan.mirror else (0, 0)
    finally:
        for process in running:
            process.kill()
            process.wait()
    latencies = [latency for one in seen for latency in one.latencies]
    p50, p99 = np.percentile(latencies, [50, 99])
    requests = sum(one.store_requests for one in seen) + after[0] - before[0]
    return Row(
        way=way,
        readers=size.readers,
        versions=size.versions,
        delivered=len(latencies),
        p50_s=float(p50),
        p99_s=float(p99),
        max_s=max(latencies),
        store_requests_per_second=requests / elapsed,
        store_requests_per_version=requests / size.versions,
        store_bytes_per_version=(sum(one.store_bytes for one in seen) + after[1] - before[1]) / size.versions,
        reader_requests_per_second=sum(one.store_requests + one.mirror_requests for one in seen) / elapsed,
        errors=sum(one.errors for one in seen),
        wrong=sum(one.wrong for one in seen),
    )


def probes(plan: Plan, store: Store, mirror: str, pid: int, seconds: float) -> list[Probe]:
    """Single requests, to the store and to the mirror."""
    bulk = bytes(range(256)) * (BULK_BYTES // 256)
    bulk_key = keys.blob(RUN, 0, blake3(bulk).hexdigest())
    store.put(bulk_key, bulk)
    manifest, missing = keys.manifest(RUN, 0), keys.manifest(RUN, 99_999_999)
    signer = Signer(plan)

    async def work() -> list[Probe]:
        found = []
        places = (("store", signer.url, None), ("mirror", lambda key: f"{mirror}/v1/objects/{key}", pid))
        for where, url, process in places:
            for what, key, alone, together in (
                ("manifest", manifest, 50, 32),
                ("not there yet", missing, 50, 32),
                ("16 MiB", bulk_key, 3, 4),
            ):
                one = await probe(
                    f"{where}: {what}", url(key), alone=alone, together=together, seconds=seconds, pid=process
                )
                found.append(one)
        return found

    return asyncio.run(work())


def run(size: Size, folder: Path) -> tuple[list[Row], list[Probe], int]:
    """All ways on one server; the last number is the bytes of a delta."""
    (folder / "weed").mkdir()
    with serving(folder / "weed", BUCKET) as variables:
        os.environ.update(variables)
        board = f"s3://{BUCKET}/runs"
        store = open_store(board)
        writer = Writer(store)
        rows = []
        with mirror_process(board, store, folder / "cache") as (mirror, pid):

            def plan(url: str | None, signed: bool) -> Plan:
                return Plan(
                    readers=size.readers,
                    run_id=RUN,
                    bucket=BUCKET,
                    prefix="runs",
                    endpoint=variables["AWS_ENDPOINT_URL"],
                    first=writer.next,
                    last=writer.next + size.versions - 1,
                    poll_s=size.poll_s,
                    check_s=CHECK_S,
                    mirror=url,
                    signed=signed,
                )

            times = probes(plan(None, False), store, mirror, pid, 0.5 if size is QUICK else 3.0)
            ways = (("store alone", None, False), ("mirror", mirror, False), ("mirror, signed", mirror, True))
            for way, url, signed in ways:
                rows.append(measure(way, size, writer, plan(url, signed)))
        (delta,) = (key for key in store.list(keys.blobs(RUN, 1)))
        return rows, times, len(store.get(delta))


def measured(rows: list[Row], times: list[Probe]) -> fanout_model.Measured:
    """What the simulation takes over."""
    by_name = {one.what: one for one in times}
    return fanout_model.Measured(
        store_request_s=by_name["store: manifest"].p50_s,
        store_first_byte_s=by_name["store: manifest"].p50_s,
        mirror_request_s=by_name["mirror: manifest"].p50_s,
        mirror_requests_per_s=by_name["mirror: manifest"].per_cpu_second or 0.0,
        mirror_bytes_per_s=by_name["mirror: 16 MiB"].bytes_per_cpu_second or 0.0,
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="100 readers: under 60 s.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fanout(quick: bool, as_json: bool) -> None:
    """Measure how one board reaches many readers, and simulate 10,000 islands from it."""
    torch.set_num_threads(1)
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        rows, times, delta_bytes = run(size, Path(folder))
    found = measured(rows, times)
    outcomes = fanout_model.outcomes(found, islands=1000 if quick else 10_000)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "delta_bytes": delta_bytes,
                    "rows": [asdict(row) for row in rows],
                    "probes": [asdict(one) for one in times],
                    "measured": asdict(found),
                    "simulated": [asdict(one) for one in outcomes],
                }
            )
        )
        return
    click.echo(f"deltas of {delta_bytes / 1e3:.0f} kB every {size.interval_s:g} s, polls every {size.poll_s:g} s\n")
    click.echo(table(rows))
    click.echo("\n| one request | p50 | p99 | many at once, a second | a second of the mirror's processor |")
    click.echo("|---|---|---|---|---|")
    for one in times:
        rates = [(one.per_second, one.bytes_per_second), (one.per_cpu_second, one.bytes_per_cpu_second)]
        cells = " | ".join(_rate(one.what, *rate) for rate in rates)
        click.echo(f"| {one.what} | {1e3 * one.p50_s:.1f} ms | {1e3 * one.p99_s:.1f} ms | {cells} |")
    click.echo(f"\n{fanout_model.table(outcomes)}")


def _rate(what: str, requests: float | None, size: float | None) -> str:
    if requests is None or size is None:
        return ""
    return f"{size / 1e6:,.0f} MB" if "MiB" in what else f"{requests:,.0f} requests"


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| way | delivered | latency p50 | p99 | max | store: requests/s | requests a version | bytes a version "
        "| wrong | errors |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.way} | {row.delivered} | {row.p50_s:.3f} s | {row.p99_s:.3f} s | {row.max_s:.3f} s | "
        f"{row.store_requests_per_second:.1f} | {row.store_requests_per_version:.0f} | "
        f"{row.store_bytes_per_version / 1e6:.3f} MB | {row.wrong} | {row.errors} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    fanout()
