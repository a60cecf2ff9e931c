"""What a study finds on its board, what it refuses, and what it leaves of a finished run."""

from __future__ import annotations

import pytest

from sprawl.board import keys
from sprawl.board.store import MemoryStore
from sprawl.errors import ConfigError, SprawlError
from sprawl.report.data import load_run
from sprawl.study.board import check_definitions, differences, find_cell, keep_ledger_only, open_board
from sprawl.study.plan import plan_cells
from tests.report.plausible import put
from tests.study.support import ledger, make_study


@pytest.fixture
def cells():
    return plan_cells(make_study(), only=["prf", "dense"], seeds=[7])


def test_nothing_is_there_before_the_first_run(tmp_path, cells):
    assert open_board(str(tmp_path / "none")) is None
    assert check_definitions(None, cells) == {}
    assert find_cell(MemoryStore(), cells[0]) is None


def test_the_same_definition_is_reused_and_another_one_refused(cells):
    store = MemoryStore()
    put(store, ledger(cells[0]))
    assert check_definitions(store, cells)[cells[0].run_id].finished
    changed = plan_cells(make_study(overrides={"optimizer.lr": 3e-5, "grpo.clip_high": 0.3}), only=["prf"], seeds=[7])
    says = r"three-prf-s7 was made with grpo.clip_high=0.2, now 0.3, optimizer.lr=1e-05, now 3e-05 \(give the changed"
    with pytest.raises(ConfigError, match=says):
        check_definitions(store, changed)


def test_what_a_section_says_that_is_off_does_not_count(cells):
    """So that better defaults of a part that a study does not use leave its runs what they are."""
    recorded = cells[0].config.model_dump(mode="json")
    assert recorded["control"]["enabled"] is recorded["anchor"]["enabled"] is False
    recorded["control"] |= {"patience": 7}
    recorded["anchor"] |= {"blend": 0.5}
    assert differences(recorded, cells[0].config, "run.json") == []
    recorded["control"]["enabled"] = True
    found = differences(recorded, cells[0].config, "run.json")
    assert "control.enabled=True, now False" in found


def test_a_record_of_an_older_release_has_the_defaults_and_the_board_does_not_count(cells):
    recorded = cells[0].config.model_dump(mode="json") | {"board": "s3://elsewhere"}
    del recorded["threads"], recorded["grpo"]["off_policy"]
    assert differences(recorded, cells[0].config, "run.json") == []
    recorded["problems"] = {"name": "addition", "params": {"digits": 3}}
    assert differences(recorded, cells[0].config, "run.json") == [
        "problems.params={'digits': 3}, now {'digits': 2}",
    ]


def test_only_the_ledger_of_a_finished_run_is_kept(cells):
    store = MemoryStore()
    done, half = ledger(cells[0]), ledger(cells[1], steps=12)
    put(store, done)
    put(store, half)
    heavy = [
        keys.manifest(cells[0].run_id, 3),
        keys.blob(cells[0].run_id, 3, "ab"),
        keys.rollouts(cells[0].run_id, 3),
        keys.sign_map(cells[0].run_id, 20, "cd"),
        keys.anchor_state(cells[0].run_id, 20),
        keys.checkpoint(cells[0].run_id, 10),
        keys.checkpoint_blob(cells[0].run_id, 10, "masters"),
    ]
    other = keys.checkpoint(cells[1].run_id, 10)
    for key in (*heavy, other):
        store.put(key, b"x")
    assert keep_ledger_only(store, cells[0].run_id) == len(heavy)
    assert load_run(store, cells[0].run_id) == done
    assert not any(store.exists(key) for key in heavy)
    assert store.exists(other)
    with pytest.raises(SprawlError, match="three-dense-s7 has not finished"):
        keep_ledger_only(store, cells[1].run_id)
