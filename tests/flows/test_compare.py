"""The compare flow: a task run an arm and seed, tables as artifacts, failures at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows import compare as module
from flows import server
from sprawl.board.store import open_store
from sprawl.errors import ConfigError, SprawlError
from sprawl.study import runner
from sprawl.study.plan import plan_cells
from tests.report.plausible import put
from tests.study.support import ledger, make_study, study_data


@pytest.fixture
def study_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(Path(__file__).parents[2] / "configs")  # where the study's base model is
    path = tmp_path / "three.yaml"
    path.write_text(yaml.safe_dump(study_data()))
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_every_run_is_a_task_and_a_failed_one_does_not_cost_the_others(
    study_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tmp_path / "board"
    cells = plan_cells(make_study(), seeds=[7])
    for cell in cells[:2]:
        put(open_store(str(board), create=True), ledger(cell))
    monkeypatch.setattr(
        runner, "run_command", lambda *_, **__: [sys.executable, "-c", "print('sprawl: no luck'); raise SystemExit(2)"]
    )
    with pytest.raises(SprawlError, match=r"1 of 3 runs failed: .*three-dense-s7: ended with code 2 \(no luck\)"):
        module.compare(study=str(study_file), board=str(board), seeds=[7], parallel=2, out=str(tmp_path / "out"))
    assert (tmp_path / "out" / "all.png").exists()
    table = (tmp_path / "out" / "arms.md").read_text()
    assert "| prf + anchor | 1 | 60 |" in table
    server.flush()
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs()
        mine = {run.name: run.state_name for run in runs if run.name.startswith("three-")}
        artifacts = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["compare-three-arms"]))
        )
    assert mine == {"three-prf-anchor-s7": "Completed", "three-prf-s7": "Completed", "three-dense-s7": "Failed"}
    assert artifacts[0].data == table


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_what_is_wrong_is_found_before_anything_starts(study_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_train", lambda *_: pytest.fail("nothing may start"))
    with pytest.raises(ConfigError, match="no arm 'nobody'"):
        module.compare(study=str(study_file), only=["nobody"])
