"""Ctrl-C while a command waits for a file: it ends with exit code 130 and shows no traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import sprawl.cli
from tests.conftest import PATIENCE


def interrupt_reader(fifo: Path, began: threading.Event) -> None:
    """Ctrl-C once somebody reads from `fifo`, who then waits for as long as it is open here."""
    deadline = time.monotonic() + 60 * PATIENCE
    while time.monotonic() < deadline:
        try:
            descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads yet
            time.sleep(0.01)
            continue
        began.set()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.close(descriptor)
        return


@pytest.mark.parametrize(
    "command",
    [
        "plan FIFO",
        "compare FIFO --list",
        "run FIFO --runner plain",
        "delta apply FIFO FIFO -o {tmp}/rebuilt",
        "metrics export --board {tmp}",
        "report --board {tmp}",
        "anchor --board {tmp}",
        "fleet status --board {tmp} --fleet none",
        "fleet run --board {tmp} --fleet none",
        "board ls {tmp}",
        "board verify {tmp} latest",
        "board gc {tmp} latest --keep 1",
        "board pull {tmp} latest {tmp}/copy",
        "board export {tmp} latest {tmp}/layout",
    ],
)
def test_ctrl_c_ends_a_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fifo = tmp_path / "run-1" / "run.json"  # of a board, where the command reads that first
    fifo.parent.mkdir()
    os.mkfifo(fifo)
    argv = command.replace("FIFO", str(fifo)).format(tmp=tmp_path).split()
    monkeypatch.setattr(sys, "argv", ["sprawl", *argv])
    began = threading.Event()
    thread = threading.Thread(target=interrupt_reader, args=(fifo, began), daemon=True)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        sprawl.cli.main()
    thread.join()
    assert began.is_set()
    assert ended.value.code == 130
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err + shown.out
    assert not (tmp_path / "rebuilt").exists()
