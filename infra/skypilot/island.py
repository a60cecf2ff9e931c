"""What `sky/scripts/island.sh` runs: `sprawl island` as a child, drained when this machine is about to be taken.

Exit codes, by which SkyPilot decides what becomes of the job:
    0    the island ended because nobody needs it any more: the job is done and its machine is given back
    143  it was told to leave (SIGTERM, a notice of preemption): the job is recovered elsewhere
    3    it cannot vouch for its weights, and anything else that `sprawl island` says: an error
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import httpx

from infra.skypilot.address import Source, advertised_url, public_sources
from infra.skypilot.metadata import NOWHERE, Metadata, of_machine
from infra.skypilot.nodes import read_nodes
from infra.skypilot.trainer import required
from sprawl.errors import SprawlError

log = logging.getLogger("island")

TOLD_TO_LEAVE = 143
LOOK_S = 5.0
RUN_WAIT_S = 3600
LEAVE_S = 100.0  # draining takes 30 s at most; AWS gives two minutes


def island_command(environment: Mapping[str, str], home: Path, sources: list[Source]) -> list[str]:
    """The command of this machine's island. Raises SprawlError for a board, an address or a port that are missing."""
    nodes = read_nodes(environment)
    port = int(environment.get("SPRAWL_PORT") or 8300)
    url = advertised_url(environment.get("SPRAWL_ADVERTISE") or "public", port, nodes.ip, sources)
    argv = [
        *(sys.executable, "-m", "sprawl.cli", "island"),
        *("--board", required(environment, "SPRAWL_BOARD"), "--run-id", environment.get("SPRAWL_RUN_ID") or "latest"),
        *("--wait-for-run", str(RUN_WAIT_S), "--obey-fleet"),
        *("--host", "0.0.0.0", "--port", str(port), "--advertise-url", url, "--cache", str(home / "cache")),
    ]
    if (name := island_name(environment)) is not None:
        argv += ["--island-id", name]
    if float(environment.get("SPRAWL_IDLE_EXIT_S") or 0) > 0:
        argv += ["--exit-when-idle", environment["SPRAWL_IDLE_EXIT_S"]]
    if environment.get("SPRAWL_ENGINE"):
        argv += ["--engine", environment["SPRAWL_ENGINE"]]
    if environment.get("SPRAWL_ENGINE_ARGS"):
        argv += ["--engine-args", environment["SPRAWL_ENGINE_ARGS"]]
    return argv


def island_name(environment: Mapping[str, str]) -> str | None:
    """The island's id: the given one, else one made from the managed job, which is the same after a recovery. With
    several nodes each has its own. None where nothing names it: it takes a random one."""
    nodes = read_nodes(environment)
    name = environment.get("SPRAWL_ISLAND_ID")
    if not name and (job := environment.get("SKYPILOT_MANAGED_JOB_ID")):
        name = f"job-{job}"
    if not name:
        return None
    return f"{name}-{nodes.rank}" if len(nodes.ips) > 1 else name


class Keeper:
    """Keeps one island: passes a wish to leave on to it, once, and remembers that there was one."""

    def __init__(self, argv: list[str]) -> None:
        self.told_to_leave = False
        self._leaving = threading.Event()
        self._process = subprocess.Popen(argv)

    def leave(self, why: str) -> None:
        """Let the island drain. Also from a signal handler, and again."""
        self.told_to_leave = True
        if not self._leaving.is_set():
            self._leaving.set()
            print(f"{why}: the island drains", flush=True)
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def watch(self, metadata: Metadata, look_s: float = LOOK_S) -> None:
        """Ask the cloud until it says that it takes this machine. Returns at once where no cloud answers."""
        while metadata.cloud != NOWHERE and not self._leaving.wait(look_s):
            try:
                notice = metadata.preempted()
            except httpx.HTTPError as error:
                log.warning("the metadata server: %s", error)
                continue
            if notice is not None:
                self.leave(f"this machine is about to be taken ({notice})")

    def wait(self) -> int:
        """The exit code for SkyPilot, once the island has ended; one that does not drain in time is killed."""
        while True:
            try:
                code = self._process.wait(1.0 if not self._leaving.is_set() else LEAVE_S)
                break
            except subprocess.TimeoutExpired:
                if self._leaving.is_set():
                    self._process.kill()
        return TOLD_TO_LEAVE if self.told_to_leave else code if code >= 0 else 128 - code


def main() -> int:
    home = Path(os.environ.get("SPRAWL_HOME") or Path.home() / ".sprawl")
    home.mkdir(parents=True, exist_ok=True)
    metadata = of_machine(os.environ)
    keeper = Keeper(island_command(os.environ, home, public_sources(os.environ, metadata)))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: keeper.leave("told to leave"))
    pid = home / "island.pid"
    pid.write_text(f"{os.getpid()}\n")
    threading.Thread(target=keeper.watch, args=(metadata,), daemon=True).start()
    try:
        return keeper.wait()
    finally:
        pid.unlink(missing_ok=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every look at the metadata server
    try:
        sys.exit(main())
    except SprawlError as error:
        print(f"island: {error}", file=sys.stderr)
        sys.exit(2)
