"""An island that follows its run through a mirror, loses it, and goes on."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.mirror.support import metric, running, wait_for
from tests.rollout.processes import DiskRun, command, process

pytestmark = pytest.mark.slow


def test_an_island_follows_through_a_mirror_and_without_it(tmp_path: Path) -> None:
    run = DiskRun(tmp_path / "runs")
    run.publish()

    def ready(version: int) -> Any:
        return next((r for r in run.ledger.islands() if (r.state, r.applied) == ("ready", version)), None)

    with (
        running(run.board, tmp_path / "cache", "--region", "east") as (mirror, record),
        process(command(run, "--region", "east"), tmp_path / "log"),
    ):
        wait_for(lambda: ready(0))
        wait_for(lambda: metric(record.url, "waiting_readers") == 1)
        for version in (1, 2):
            run.publish()
            wait_for(lambda version=version: ready(version), 20)
        assert metric(record.url, "board_requests_total") >= 3
        mirror.kill()
        mirror.wait()
        run.publish()
        island = wait_for(lambda: ready(3), 20)
        assert island.versions_verified == island.versions_applied == 4
        assert httpx.get(f"{island.url}/health").status_code == 200
