"""`python -m benchmarks.optimizers`: what it reads off a finished run, with a stand-in for the training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import optimizers
from sprawl.board.ledger import Ledger
from sprawl.board.store import open_store
from sprawl.config import load_config
from sprawl.delta.state import served_view
from sprawl.errors import SprawlError
from sprawl.report.data import RunData
from sprawl.train.checkpoint import save_checkpoint
from sprawl.train.optimizer import build_optimizer, is_hidden_matrix
from tests.report.plausible import make_run_record, make_step, put
from tests.train.helpers import make_config, make_decoder

VIEWS = ("bfloat16", "float8_e4m3", "nvfp4")
CONFIG = Path(__file__).parents[2] / "configs" / "tiny.yaml"


@pytest.fixture(autouse=True)
def only_formats_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's policy is 32 wide: groups of 128 do not fit."""
    monkeypatch.setattr(optimizers, "_VIEWS", VIEWS)


def finished_run(board: str, run_id: str, overrides: Sequence[str]) -> tuple[dict[str, torch.Tensor], ...]:
    """Two steps of a small policy on the board, as a run leaves them; returns the hidden masters before and after."""
    store = open_store(board, create=True)
    run = make_run_record(*overrides, steps=2, run_id=run_id)
    put(store, RunData.of(run, [make_step(1, reward=0.25), make_step(2, reward=0.75, changed_share=0.03)]))
    decoder = make_decoder()
    optimizer = build_optimizer(decoder, make_config().optimizer)
    states = []
    for step in (1, 2):
        for parameter in decoder.parameters():
            parameter.data.add_(1e-5 * torch.randn(parameter.shape))
        save_checkpoint(store, Ledger(store, run_id), step, 1, decoder, optimizer)
        named = decoder.named_parameters()
        states.append({name: p.detach().clone() for name, p in named if is_hidden_matrix(name, p)})
    return tuple(states)


def test_a_row_is_what_the_ledger_and_the_masters_say(tmp_path: Path) -> None:
    old, new = finished_run(str(tmp_path / "b"), "r", ["optimizer.lr=0.001"])
    row = optimizers.measure("muon", open_store(str(tmp_path / "b")), "r", load_config(CONFIG, ["steps=2"]))
    assert (row.lr, row.steps, row.reward_first, row.reward_last) == (0.001, 2, 0.25, 0.75)
    assert (row.changed_min, row.changed_max) == (0.03, 0.09)
    assert row.changed_mean == pytest.approx(0.06)
    changed = sum(int((served_view(old, "bfloat16")[n] != served_view(new, "bfloat16")[n]).sum()) for n in old)
    assert row.hidden_changed == changed / sum(tensor.numel() for tensor in old.values())
    assert row.hidden_views["bfloat16"][0] == row.hidden_changed > row.hidden_views["float8_e4m3"][0] > 0
    assert row.hidden_push_rms == pytest.approx(1e-5, rel=0.03)
    assert row.hidden_push_median == pytest.approx(0.674e-5, rel=0.15)
    assert row.hidden_predicted == pytest.approx(row.hidden_changed, rel=0.25)


def test_the_third_arm_moves_as_far_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    started = {}
    views = dict.fromkeys(VIEWS, (0.1, 0.2))

    def run_arm(arm: str, config: Path, board: str, overrides: Sequence[str]) -> optimizers.Row:
        settings = load_config(config, list(overrides))
        started[arm] = settings
        rms = 4e-6 if settings.optimizer.kind == "adamw" else 0.1 * settings.optimizer.lr
        return optimizers.Row(arm, settings.optimizer.lr, 3, 0.1, 0.2, 0.3, 0.2, 0.4, 0.01, 0.1, 0.1, 1e-6, rms, views)

    monkeypatch.setattr(optimizers, "run_arm", run_arm)
    result = CliRunner().invoke(optimizers.optimizers, ["--config", str(CONFIG), "--quick", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["arm"]: row for row in json.loads(result.stdout)}
    assert list(rows) == ["adamw", "muon", "muon-rms"]
    assert rows["adamw"]["lr"] == rows["muon"]["lr"] == 1e-5
    assert rows["muon-rms"]["hidden_push_rms"] == pytest.approx(rows["adamw"]["hidden_push_rms"])
    assert [started[arm].optimizer.kind for arm in rows] == ["adamw", "muon", "muon"]
    assert all(settings.boundary.codec == "dense" for settings in started.values())
    lines = CliRunner().invoke(optimizers.optimizers, ["--config", str(CONFIG), "--quick"]).stdout.splitlines()[:5]
    assert [line.split("|")[1].strip() for line in lines] == ["arm", "---", "adamw", "muon", "muon-rms"]


def test_an_arm_that_does_not_finish_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(optimizers, "stream", lambda command, prefix: 2)
    with pytest.raises(SprawlError, match="arm muon ended with code 2"):
        optimizers.run_arm("muon", CONFIG, str(tmp_path), ["steps=2"])
