"""How long one request takes and how many a second are answered: the object store and a mirror, one after another."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp
import numpy as np
import psutil
import yarl


@dataclass(frozen=True)
class Probe:
    """One kind of request. Seconds of a single one when nothing else is going on (median and p99), what several
    connections get through in a second, and, where the server is one process, in a second of its processor time."""

    what: str
    p50_s: float
    p99_s: float
    per_second: float
    bytes_per_second: float
    per_cpu_second: float | None
    bytes_per_cpu_second: float | None


async def probe(
    what: str, url: str, *, alone: int = 100, together: int = 32, seconds: float = 2.0, pid: int | None = None
) -> Probe:
    """Ask for one object over and over. Raises aiohttp.ClientError, AssertionError on an unexpected status."""
    target = yarl.URL(url, encoded=True)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask() -> int:
            async with http.get(target) as answer:
                assert answer.status in (200, 404), f"{what}: {answer.status}"
                return len(await answer.read())

        times = []
        await ask()
        for _ in range(alone):
            started = time.perf_counter()
            await ask()
            times.append(time.perf_counter() - started)
        end = time.perf_counter() + seconds
        requests, total = 0, 0

        async def keep_asking() -> None:
            nonlocal requests, total
            while time.perf_counter() < end:
                total += await ask()
                requests += 1

        server = psutil.Process(pid) if pid is not None else None
        before = _cpu_seconds(server)
        started = time.perf_counter()
        await asyncio.gather(*(keep_asking() for _ in range(together)))
        elapsed = time.perf_counter() - started
        busy = _cpu_seconds(server) - before
    p50, p99 = np.percentile(times, [50, 99])
    return Probe(
        what,
        float(p50),
        float(p99),
        requests / elapsed,
        total / elapsed,
        requests / busy if busy else None,
        total / busy if busy else None,
    )


def _cpu_seconds(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return times.user + times.system
