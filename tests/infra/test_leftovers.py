"""The environment of flow runs whose worker was killed."""

from __future__ import annotations

import json
import os
from pathlib import Path

from infra.leftovers import sweep

HOME = Path("/srv/run/.sprawl/prefect")


def leave(place: Path, name: str, flow_run: str, home: str = str(HOME), age_s: float = 100.0) -> Path:
    folder = place / f"prefect-workspace-attempt-{name}"
    folder.mkdir()
    (folder / "supervisor.json").write_text(json.dumps({"flow_run_id": flow_run}))
    (folder / "workspace.json").write_text(json.dumps({"environment": {"PREFECT_HOME": home, "HF_TOKEN": "secret"}}))
    stamp = folder.stat().st_mtime - age_s
    os.utime(folder, (stamp, stamp))
    return folder


def test_only_those_of_dead_flow_runs_of_this_home_go(tmp_path: Path) -> None:
    dead = leave(tmp_path, "a", "1")
    kept = [
        leave(tmp_path, "b", "2"),  # runs
        leave(tmp_path, "c", "3", home="/home/other/.prefect"),
        leave(tmp_path, "d", "4", age_s=0),  # about to start
    ]
    damaged = tmp_path / "prefect-workspace-attempt-e"
    damaged.mkdir()
    (damaged / "supervisor.json").write_text("{half")
    assert sweep(HOME, {"2"}, place=tmp_path) == 1
    assert not dead.exists()
    assert all(folder.exists() for folder in [*kept, damaged])
