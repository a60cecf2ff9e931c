"""The comparison benchmark's driver, with a stand-in for the training command."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import arms
from sprawl.board.store import open_store
from sprawl.config import load_config
from sprawl.errors import SprawlError
from tests.report.plausible import make_run, put

CONFIG = Path(__file__).parents[2] / "configs" / "tiny.yaml"
# Writes the plausible run that an arm would leave; the arguments are board, run id and arm.
STAND_IN = """
import sys
from sprawl.board.store import open_store
from tests.report.plausible import make_run, put
board, run_id, arm = sys.argv[1:]
put(open_store(board, create=True), make_run(arm, steps=12, run_id=run_id))
print("step 12/12")
"""
KIND = {"prf-anchor": "prf", "prf": "no_anchor", "dense": "dense"}


@pytest.fixture
def stand_in(monkeypatch):
    """Replaces the training command; the list collects (run id, resumed)."""
    started = []

    def command(config, board, run_id, overrides, known):
        started.append((run_id, known is not None))
        kind = next(KIND[arm.name] for arm in reversed(arms.ARMS) if run_id.startswith(f"arms-{arm.name}-t"))
        return [sys.executable, "-c", STAND_IN, board, run_id, kind]

    monkeypatch.setattr(arms, "arm_command", command)
    return started


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("arm", arms.ARMS, ids=lambda arm: arm.name)
def test_every_arm_is_a_valid_config(arm, quick):
    config = load_config(CONFIG, arms.overrides_of(arm, 12, quick))
    assert config.steps == 12
    assert config.anchor.enabled == (arm.name == "prf-anchor")
    assert (config.boundary.codec == "dense") == (arm.name == "dense")


def test_commands_start_and_resume():
    start = arms.arm_command(CONFIG, "b", "arms-prf-x", ["steps=3", "anchor.enabled=false"], None)
    assert start[1:] == [
        *("-m", "sprawl.cli", "run", str(CONFIG), "--runner", "plain", "--board", "b", "--run-id", "arms-prf-x"),
        *("--set", "steps=3", "--set", "anchor.enabled=false"),
    ]
    resume = arms.arm_command(CONFIG, "b", "arms-prf-x", ["steps=3"], make_run(steps=1))
    assert resume[-2:] == ["--resume", "arms-prf-x"]
    assert "--set" not in resume


def test_three_arms_and_reuse(tmp_path, stand_in, monkeypatch):
    board, out = str(tmp_path / "board"), tmp_path / "figures"
    arguments = ["--config", str(CONFIG), "--board", board, "--out", str(out), "--tag", "t", "--quick", "--json"]
    result = CliRunner().invoke(arms.arms, arguments, catch_exceptions=False)
    assert [row["label"] for row in json.loads(result.stdout)] == ["prf + anchor", "prf, no anchor", "dense"]
    assert "dense | step 12/12" in result.stderr
    assert (out / "comparison.png").exists()
    assert len(stand_in) == 3
    again = CliRunner().invoke(arms.arms, arguments, catch_exceptions=False)
    assert json.loads(again.stdout) == json.loads(result.stdout)
    assert len(stand_in) == 3


def test_a_failed_arm_says_how_to_continue(tmp_path, monkeypatch):
    monkeypatch.setattr(arms, "arm_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(SprawlError, match=r"ended with code 3 .*--tag t"):
        arms.run_arm(arms.ARMS[0], CONFIG, str(tmp_path), "arms-prf-anchor-t", ["steps=12"])


def test_a_tag_of_another_length_is_refused(tmp_path, stand_in):
    put(open_store(str(tmp_path), create=True), make_run(steps=12, run_id="arms-prf-anchor-t"))
    with pytest.raises(SprawlError, match=r"exists with 12 steps, not 20 \(choose another --tag\)"):
        arms.run_arm(arms.ARMS[0], CONFIG, str(tmp_path), "arms-prf-anchor-t", ["steps=20"])
    assert stand_in == []
