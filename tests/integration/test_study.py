"""A study of two real arms, a few small steps each: trained, reused, laid side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from sprawl.board.ledger import Ledger
from sprawl.board.store import open_store
from sprawl.cli import cli

STUDY = {
    "name": "pair",
    "title": "Dense and compressed",
    "base": "configs/tiny.yaml",
    "steps": 4,
    "seeds": [3],
    "parallel": 2,
    "keep": "ledger",
    "overrides": {
        "rollout.islands": 1,
        "rollout.prompts": 2,
        "rollout.samples": 4,
        "rollout.max_staleness": 3,
        "checkpoint.every": 2,
        "anchor.every": 2,
        "anchor.lag": 2,
        "evaluate.every": 4,
        "evaluate.problems": 10,
    },
    "arms": [
        {"name": "dense", "overrides": {"boundary.codec": "dense", "anchor.enabled": False}},
        {"name": "prf-anchor"},
    ],
    "groups": [{"name": "both", "title": "Both", "arms": ["*"], "panels": ["reward"]}],
}


@pytest.mark.slow
def test_two_arms_end_to_end(tmp_path: Path) -> None:
    study, board = tmp_path / "pair.yaml", tmp_path / "board"
    study.write_text(yaml.safe_dump(STUDY))
    arguments = ["compare", str(study), "--board", str(board), "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    dense, prf = json.loads(result.stdout)["arms"]
    assert (dense["complete"], prf["complete"]) == (["pair-dense-s3"], ["pair-prf-anchor-s3"])
    assert dense["measures"]["boundary_bytes_ratio"]["mean"] == 1.0
    assert prf["measures"]["boundary_bytes_ratio"]["mean"] == pytest.approx(6 / 128, abs=0.005)
    assert not dense["violations"] + prf["violations"]
    assert (tmp_path / "out" / "both.png").exists()

    store = open_store(str(board))
    rewards = {}
    for run_id in ("pair-dense-s3", "pair-prf-anchor-s3"):
        steps = Ledger(store, run_id).steps()
        # Versions are pinned three behind: every batch of these four steps is the base model's, and the same one.
        assert [record.staleness for record in steps] == [0.0, 1.0, 2.0, 3.0]
        rewards[run_id] = [record.reward for record in steps]
        assert not store.list(f"{run_id}/blobs/")
        assert not store.list(f"{run_id}/checkpoints/")
    assert rewards["pair-dense-s3"] == rewards["pair-prf-anchor-s3"], "arms of a seed meet the same problems"

    again = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert again.stderr.count("had finished: reused") == 2
    assert json.loads(again.stdout) == json.loads(result.stdout)
