"""Runs a command that must not outlive the process that started it: `python launch.py COMMAND ...` with a pipe as
standard input.

The other end of the pipe belongs to the starter. When that goes away, however it ends, the whole process group is
killed: an engine whose island was killed would otherwise go on holding its memory. Start it in a session of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """The exit code of the command, 128 + n for signal n."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_die_with_starter, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _die_with_starter() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
