"""Tables, figures and JSON of a study, and the command around them."""

from __future__ import annotations

import json

import pytest
import yaml
from click.testing import CliRunner

from sprawl.board.store import open_store
from sprawl.cli import cli
from sprawl.errors import SprawlError
from sprawl.report.style import BLUE, GREEN, PURPLE, VERMILLION
from sprawl.study.figures import colours, group_figure, mean_curve, short_labels
from sprawl.study.measures import arm_runs
from sprawl.study.plan import plan_cells
from sprawl.study.results import make_results, table_rows
from tests.report.plausible import put
from tests.study.support import ledger, make_study, study_data

ALL_PANELS = ["reward", "reward_wall", "entropy", "kl", "mismatch", "grad_norm", "accuracy"]


def trained(study, cells):
    return {cell.run_id: ledger(cell) for cell in cells}


def test_arms_with_more_steps_have_a_second_row():
    study = make_study()
    cells = plan_cells(study)
    rows = table_rows(study, cells, trained(study, cells), quick=False)
    assert [(runs.arm.name, runs.steps) for runs in rows] == [
        *(("prf-anchor", 40), ("prf-anchor", 60), ("prf", 40), ("dense", 40)),
    ]


def test_every_panel_is_drawn_and_the_mean_ends_with_the_first_run():
    study = make_study(groups=[{"name": "g", "title": "G", "arms": ["prf", "dense"], "panels": ALL_PANELS}])
    cells = plan_cells(study)
    known = trained(study, cells) | {"three-prf-s8": ledger(cells[4], steps=25)}
    group = study.groups[0]
    figure = group_figure(group, [arm_runs(study, arm, cells, known, 40) for arm in study.arms_of(group)])
    drawn = [ax for ax in figure.axes if ax.get_visible()]
    assert len(drawn) == len(ALL_PANELS)
    reward = drawn[0].get_lines()
    assert len(reward) == 6, "two seeds and their mean, twice"
    first, second, mean = (line.get_xdata()[-1] for line in reward[:3])
    assert (first, second, mean) == (40, 25, 25)
    assert mean_curve([[(1, 1.0), (2, 2.0)], [(2, 4.0), (3, 9.0)]]) == [(2, 3.0)]
    assert mean_curve([]) == []


def test_colours_and_labels():
    arms = [{"name": "a"}, {"name": "b", "colour": "blue"}, {"name": "c"}, {"name": "d", "colour": "vermillion"}]
    study = make_study(arms=arms, groups=[{"name": "g", "title": "G", "arms": ["*"]}])
    cells = plan_cells(study)
    runs = [arm_runs(study, arm, cells, {}, 40) for arm in study.all_arms()]
    assert colours(study.groups[0], runs) == [GREEN, BLUE, PURPLE, VERMILLION]
    shades = colours(study.groups[0].model_copy(update={"ordered": True}), runs)
    assert len(set(shades)) == 4
    assert short_labels(["prf, 1, tis", "prf, 2, tis"]) == ["1", "2"]
    assert short_labels(["prf", "prf, 2"]) == ["prf", "2"]
    assert short_labels(["prf, 1"]) == ["prf, 1"]


def test_the_command_writes_tables_figures_and_json_of_what_is_there(tmp_path):
    study_file, board = tmp_path / "three.yaml", tmp_path / "board"
    study_file.write_text(yaml.safe_dump(study_data(tables=["arms", "staleness"])))
    cells = plan_cells(make_study())
    store = open_store(str(board), create=True)
    for cell in cells[:4]:
        put(store, ledger(cell))
    put(store, ledger(cells[4], steps=20))
    arguments = ["compare", str(study_file), "--board", str(board), "--out", str(tmp_path / "out")]

    listed = CliRunner().invoke(cli, [*arguments, "--list"], catch_exceptions=False).stdout
    assert [line.split(maxsplit=1)[1] for line in listed.splitlines()] == [
        *("finished, 60 steps", "finished, 40 steps", "finished, 40 steps"),
        *("finished, 60 steps", "stopped or running, 20 of 40 steps", "not started, 40 steps"),
    ]

    result = CliRunner().invoke(cli, [*arguments, "--no-run", "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert [(row["arm"], row["steps"], row["seeds"]) for row in data["arms"]] == [
        *(("prf-anchor", 40, [7, 8]), ("prf-anchor", 60, [7, 8]), ("prf", 40, [7, 8]), ("dense", 40, [7])),
    ]
    assert data["arms"][2]["verdicts"] == {
        "7": {"kind": "healthy", "step": None},
        "8": {"kind": "unfinished", "step": 20},
    }
    assert data["arms"][3]["measures"]["boundary_bytes_ratio"]["mean"] == 1.0
    assert data["staleness"]["dense"]["staleness"]["mean"] == pytest.approx(0.92, abs=0.05)
    assert (tmp_path / "out" / "all.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == data
    table = (tmp_path / "out" / "arms.md").read_text().splitlines()
    assert len({line.count("|") for line in table[:6]}) == 1


def test_nothing_to_compare_is_said():
    study = make_study()
    cells = plan_cells(study)
    with pytest.raises(SprawlError, match="no run of study three has an optimizer step yet"):
        make_results(study, cells, {}, quick=False)
