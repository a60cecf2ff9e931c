"""Short real runs that serve a quantised view from signed versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sprawl.board.ledger import Ledger
from sprawl.board.reader import VersionReader
from sprawl.board.signing import SignatureProblem, Trust, generate
from sprawl.board.store import open_store
from sprawl.board.verify import verify_board

ROOT = Path(__file__).parents[2]
STEPS = 4
SETTINGS = [
    f"steps={STEPS}",
    "anchor.every=2",
    "anchor.lag=2",
    "checkpoint.every=2",
    "publish.keyframe_every=3",
    "evaluate.problems=10",
    "rollout.prompts=4",
    "rollout.samples=4",
]


def run(board: Path, format: str, key: Path, trusted: Path) -> subprocess.CompletedProcess[str]:
    settings = [part for setting in [*SETTINGS, f"publish.dtype={format}"] for part in ("--set", setting)]
    base = [sys.executable, "-m", "sprawl.cli", "run", "configs/tiny.yaml", "--runner", "plain"]
    keys = {"SPRAWL_SIGNING_KEY": str(key), "SPRAWL_TRUSTED_KEYS": str(trusted)}
    return subprocess.run(
        [*base, "--board", str(board), "--run-id", format, *settings],
        cwd=ROOT,
        env={**os.environ, **keys},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("format", ["float8_e4m3_block", "nvfp4", "int4_g32"])
def test_quantised_views_are_served_and_signed(tmp_path: Path, format: str) -> None:
    pytest.importorskip("cryptography")
    generate(tmp_path / "key", "trainer")
    generate(tmp_path / "other", "somebody else")
    board = tmp_path / "board"
    done = run(board, format, tmp_path / "key", tmp_path / "key.pub")
    assert done.returncode == 0, done.stderr

    store = open_store(str(board))
    report = verify_board(store, format, trust=Trust.load(tmp_path / "key.pub"))
    assert report.ok, report.problems
    assert report.versions == STEPS + 1
    parts = {name.rpartition(".")[2] for name in VersionReader(store, format).materialise(STEPS).state}
    assert "weight_scale_inv" in parts or "weight_packed" in parts
    islands = [event.data for event in Ledger(store, format).events() if event.kind == "island_report"]
    assert islands
    assert all(island["versions_verified"] == island["versions_applied"] > 0 for island in islands)

    with pytest.raises(SignatureProblem, match="not trusted here"):
        VersionReader(store, format, trust=Trust.load(tmp_path / "other.pub")).manifest(0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_does_not_trust_its_own_key_stops_before_any_work(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    generate(tmp_path / "key", "trainer")
    generate(tmp_path / "other", "somebody else")
    done = run(tmp_path / "board", "bfloat16", tmp_path / "key", tmp_path / "other.pub")
    assert done.returncode == 2, done.stderr
    assert "which is not trusted here" in done.stderr
    assert not (tmp_path / "board").exists()
