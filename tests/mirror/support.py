"""Real mirrors, a line to them that can be made bad, and a board that counts."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from blake3 import blake3

from sprawl.board.records import MirrorRecord
from sprawl.board.store import MemoryStore, Store, open_store
from sprawl.mirror.registry import mirrors


class Counting(MemoryStore):
    """Counts reads by key; `delay_s` makes each take a while, `error` makes them fail."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__("counting")
        self.reads: Counter[str] = Counter()
        self.delay_s = delay_s
        self.error: Exception | None = None

    def get(self, key: str) -> bytes:
        self.reads[key] += 1
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        return super().get(key)


class Reads:
    """A Store that counts the reads which reach the board behind it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.reads: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        self.reads[key] += 1
        return self._store.get(key)

    def of(self, part: str) -> int:
        return sum(count for key, count in self.reads.items() if part in key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Line:
    """A TCP relay in front of a mirror. What it does to the bytes that come back: `rate` (bytes per second),
    `cut_after` (bytes, then the connection ends), `flip_after` (one bit of each byte after that many is turned), `dead`
    (silence)."""

    def __init__(self, port: int) -> None:
        self.rate: float | None = None
        self.cut_after: int | None = None
        self.flip_after: int | None = None
        self.dead = False
        self.passed = 0
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._port), timeout=5)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        count = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                while self.dead:
                    time.sleep(0.05)
                if back:
                    data = self._spoil(data, count)
                    count += len(data)
                    self.passed += len(data)
                sink.sendall(data)
                if back and self.rate is not None:
                    time.sleep(len(data) / self.rate)
                if back and self.cut_after is not None and count >= self.cut_after:
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _spoil(self, data: bytes, before: int) -> bytes:
        if self.flip_after is None or before + len(data) <= self.flip_after:
            return data
        start = max(0, self.flip_after - before)
        return data[:start] + bytes(byte ^ 1 for byte in data[start:])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPRAWL_")}
    return {**kept, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **more}


def command(board: str, cache: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "sprawl.cli", "mirror", board, "--cache", str(cache), *options]


@contextlib.contextmanager
def running(
    board: str, cache: Path, *options: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[bytes], MirrorRecord]]:
    """A mirror process and its record on the board."""
    log = cache.with_suffix(".log")
    known = {record.started_at for record in mirrors(open_store(board))}
    with log.open("wb") as out:
        started = subprocess.Popen(
            command(board, cache, *options), stdout=out, stderr=subprocess.STDOUT, env=environment(**variables)
        )
    try:

        def registered() -> MirrorRecord | None:
            assert started.poll() is None, log.read_text()
            return next((r for r in mirrors(open_store(board)) if r.started_at not in known), None)

        yield started, wait_for(registered)
    finally:
        started.kill()
        started.wait()


@contextlib.contextmanager
def behind_a_line(
    board: str, cache: Path, *options: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[bytes], Line]]:
    """A mirror that readers reach over a line which can be made bad."""
    port = free_port()
    line = Line(port)
    try:
        listen = ("--listen", f"127.0.0.1:{port}", "--advertise-url", line.url)
        with running(board, cache, *listen, *options, **variables) as (process, _):
            yield process, line
    finally:
        line.close()


def wait_for(found: Callable[[], Any], limit_s: float = 60.0) -> Any:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.02)
    raise AssertionError(f"did not happen within {limit_s} s")


def metric(url: str, name: str, **headers: str) -> int:
    """A value of /metrics; sums over labels."""
    text = httpx.get(f"{url}/metrics", headers=headers).raise_for_status().text
    return sum(int(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"sprawl_mirror_{name}"))


def put_blob(store: Store, run: str, version: int, data: bytes) -> str:
    """Its key."""
    key = f"{run}/blobs/{version}/{blake3(data).hexdigest()}"
    store.put(key, data)
    return key
