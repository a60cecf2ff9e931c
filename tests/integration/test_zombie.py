"""A trainer that was taken for dead and goes on next to its successor writes nothing more, wherever it was stopped."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from sprawl.board.ledger import Ledger
from sprawl.board.reader import VersionReader
from sprawl.board.store import open_store
from sprawl.board.verify import verify_board
from tests.integration.test_resume import ROOT, STEPS, command

# What is overwritten by design: heartbeats (both fleets write them) and the hint that readers do not depend on. Stopped
# in the middle of writing the hint, the old writer puts an older one there, from a temporary file.
VOLATILE = ("/islands/", "/latest.json", "/.tmp-")


def contents(board: Path, run_id: str) -> dict[str, str]:
    found = {}
    for path in sorted((board / run_id).rglob("*")):
        if path.is_file() and not any(part in str(path) for part in VOLATILE):
            found[str(path.relative_to(board))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_zombie_writes_nothing_after_its_successor_took_over(tmp_path: Path) -> None:
    """SIGSTOP of the trainer, a successor that finishes the run, SIGCONT: ledger, manifests, checkpoints, sign maps and
    rollouts are byte for byte what the successor left."""
    board = tmp_path / "board"
    log = (tmp_path / "zombie.log").open("w+")
    # In a session of its own: a stopped member would get this whole group hung up, were its shell to end meanwhile.
    zombie = subprocess.Popen(
        command(board, "run", resume=False), cwd=ROOT, stdout=log, stderr=log, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 240
        while not (board / "run" / "manifests" / "00000003.json").exists():
            assert zombie.poll() is None, (tmp_path / "zombie.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        zombie.send_signal(signal.SIGSTOP)
        # Its islands and its anchor go on, as they would behind a cut-off machine.
        subprocess.run(command(board, "run", resume=True), cwd=ROOT, check=True, timeout=300)
        left = contents(board, "run")
        zombie.send_signal(signal.SIGCONT)
        assert zombie.wait(120) == 2
        assert "another process took over run 'run'" in (tmp_path / "zombie.log").read_text()
        assert contents(board, "run") == left
    finally:
        if zombie.poll() is None:
            for member in [*psutil.Process(zombie.pid).children(recursive=True), psutil.Process(zombie.pid)]:
                member.kill()
            zombie.wait()
        log.close()
    store = open_store(str(board))
    ledger = Ledger(store, "run")
    assert [record.step for record in ledger.steps()] == list(range(1, STEPS + 1))
    assert [record.step for record in ledger.fires()] == [4, 8, 12]
    assert verify_board(store, "run").problems == []
    assert VersionReader(store, "run").head() == STEPS
    assert "violation" not in [event.kind for event in ledger.events()]
