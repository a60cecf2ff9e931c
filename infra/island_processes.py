"""The islands that are processes of this machine, found by their command lines: whoever started them, and whether or
not that process still lives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.processes import ProcessId

LASTING = "--obey-fleet"
"""What islands are started with that outlive their starter: they end when the fleet's log on the board says so."""


@dataclass(frozen=True)
class IslandProcess:
    """`words`: its command line."""

    name: str
    identity: ProcessId
    words: tuple[str, ...]

    def has(self, *options: str) -> bool:
        """Whether these words are in its command line, one after another."""
        size = len(options)
        return any(self.words[at : at + size] == options for at in range(len(self.words) - size + 1))

    @property
    def lasting(self) -> bool:
        return self.has(LASTING)

    @property
    def prefect_home(self) -> str | None:
        """Of the flow run that started it; None without one, and when the process is gone."""
        process = self.identity.process()
        with contextlib.suppress(psutil.Error, OSError):
            return None if process is None else process.environ().get("PREFECT_HOME")
        return None


def island_processes() -> Iterator[IslandProcess]:
    """Those that have a name on their command line, as the fleets here give them one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, ValueError, IndexError):
            words = tuple(process.cmdline())
            if "sprawl.cli" not in words or words[words.index("sprawl.cli") + 1] != "island":
                continue
            identity = ProcessId.of(process.pid)
            if identity is not None and identity.alive:
                yield IslandProcess(words[words.index("--island-id") + 1], identity, words)


def lasting_islands(prefect_home: Path) -> list[ProcessId]:
    """The islands that flow runs of this Prefect home started and left."""
    return [item.identity for item in island_processes() if item.lasting and item.prefect_home == str(prefect_home)]
