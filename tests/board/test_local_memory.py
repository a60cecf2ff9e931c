"""What a copy on disk costs in memory: measured in a process of its own, as the peak above what it started with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.delta.state import state_bytes
from tests.board.states import RUN, publisher

pytestmark = pytest.mark.slow

MEASURE = """
import json, sys
from pathlib import Path
from sprawl.board.local_copy import LocalCopy, pull
from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from tests.board.states import RUN, publisher, state_of
from sprawl.board.store import MemoryStore

board, folder, warm = sys.argv[1:]

def status(name):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name))
    return int(line.split()[1]) * 1024

def peak(work):
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    work()
    return status("VmHWM") - before

small = MemoryStore()  # imports and compiled kernels are not what is measured
for version in range(2):
    publisher(small).publish(version, version, state_of(version))
    pull(VersionReader(small, RUN), warm, version)
reader = VersionReader(open_store(board), RUN)
first = peak(lambda: pull(reader, folder, 0))
step = peak(lambda: pull(reader, folder, 1))
print(json.dumps({"first": first, "step": step}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc")
def test_memory_of_a_first_pull_and_of_a_step(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "board"), create=True)
    generator = torch.Generator().manual_seed(0)
    state = {f"w{i}": torch.randn(4 << 20, generator=generator).bfloat16() for i in range(8)}
    writer = publisher(store, keyframe_every=100)
    writer.publish(0, 0, state)
    for tensor in state.values():
        tensor[torch.randint(0, 4 << 20, (80_000,), generator=generator)] *= 1.01
    writer.publish(1, 1, state)
    whole = state_bytes(state)
    delta = VersionReader(store, RUN).require(1).bytes_of("delta")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "board"), str(tmp_path / "copy"), str(tmp_path / "warm")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    print({name: round(value / whole, 2) for name, value in peaks.items()}, f"of {whole:,} bytes; delta {delta:,}")
    assert peaks["first"] < 3.3 * whole
    assert peaks["step"] < 2.0 * whole, "the mapped file, one tensor, and the decoded delta"
