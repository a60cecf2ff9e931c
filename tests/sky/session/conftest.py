"""The session: a Slurm of four nodes, SkyPilot's API server, a Prefect server, a board that all of them reach."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import pytest

from sprawl.board.ledger import Ledger
from sprawl.board.reader import VersionReader
from tests.conftest import PATIENCE
from tests.sky.session.server import SkyServer
from tests.sky.session.slurm import NAME, PARTITION, Slurm, missing

T = TypeVar("T")

ROOT = Path(__file__).parents[3]
LAUNCH_S = 300.0 * PATIENCE
WANTED = "SPRAWL_TEST_SKY"


def reason_to_skip() -> str | None:
    """One line; None when the session can run."""
    if os.environ.get(WANTED) != "1":
        return f"launches real clusters on a local Slurm, many minutes: make test-sky (or {WANTED}=1)"
    if find_spec("sky.server") is None:
        return "SkyPilot is not installed: pip install 'sprawl-rl[sky]'"
    return missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = reason_to_skip()
    for item in items:
        if reason is not None and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Session:
    slurm: Slurm
    sky: SkyServer
    directory: Path  # everything of this session; any user may enter

    @property
    def resources(self) -> dict[str, object]:
        """What takes the place of the shipped files' `resources`."""
        return {"infra": f"slurm/{NAME}/{PARTITION}", "cpus": 2, "memory": 2}

    def board(self, name: str) -> Path:
        """A board in a directory that the nodes and this process share."""
        path = self.directory / "boards" / name
        path.mkdir(parents=True)
        path.chmod(0o777)
        return path


ASK_S = 5.0
"""Between questions to SkyPilot: each takes a core of a small machine for a second."""


class Clock:
    """Says when something came true, for the record that a session leaves in its output."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def until(self, what: str, look: Callable[[], T | None], timeout_s: float = LAUNCH_S, *, every_s: float = 1.0) -> T:
        """Poll until `look` finds something; that. `every_s`: longer where looking costs what is looked at its time."""
        asked = time.monotonic()
        while True:
            found = look()
            if found:
                print(
                    f"{time.monotonic() - self._began:6.0f} s  {what} (+{time.monotonic() - asked:.0f} s)", flush=True
                )
                return found
            assert time.monotonic() - asked < timeout_s, f"not within {timeout_s:.0f} s: {what}"
            time.sleep(every_s)


def head(ledger: Ledger) -> int:
    """The newest version of a run; 0 before there is one."""
    return VersionReader(ledger.store, ledger.run_id).head() or 0


def forget_server() -> None:
    """SkyPilot's client asks its environment for the server once a process, when it is imported."""
    from sky.server.common import get_server_url

    get_server_url.cache_clear()


@pytest.fixture(scope="session")
def session() -> Iterator[Session]:
    """HOME and PATH of this process are the session's meanwhile: SkyPilot's client keeps its files at home."""
    directory = Path(tempfile.mkdtemp(prefix="sprawl-sky-"))
    directory.chmod(0o755)
    (directory / "slurm").mkdir()
    python = Path(os.path.realpath(sys.executable))
    slurm = Slurm(directory / "slurm", python, shown=(Path(sys.base_prefix), Path(sys.prefix), ROOT))
    sky = SkyServer(directory / "sky", slurm)
    before = dict(os.environ)
    try:
        slurm.start()
        sky.start()
        os.environ.update(sky.environment())
        forget_server()
        yield Session(slurm, sky, directory)
    finally:
        os.environ.clear()
        os.environ.update(before)
        forget_server()
        sky.stop()
        slurm.stop()
        keep = os.environ.get("SPRAWL_TEST_SKY_KEEP") == "1"
        print(f"logs: {directory}" if keep else "")
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)
