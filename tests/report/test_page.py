import json
import math
import re

import pytest
from click.testing import CliRunner

from sprawl.board.store import MemoryStore
from sprawl.commands.report import report
from sprawl.errors import BoardError, SprawlError
from sprawl.report.data import RunData, load_run
from sprawl.report.page import render_page, write_files, write_report
from sprawl.report.plots import FIGURES, available
from sprawl.report.style import figure_bytes
from sprawl.report.summary import summarise_data
from tests.report.plausible import (
    T0,
    make_event,
    make_island,
    make_run,
    make_run_record,
    make_step,
    make_streamed_run,
    put,
    with_control,
)

PNG, DATA_URI = b"\x89PNG\r\n\x1a\n", re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+")


def partial_run():
    bad = make_step(3, applied=False, grad_norm=math.nan, mismatch=math.nan, loss=math.nan)
    overrides = ["boundary.codec=dense", "anchor.enabled=false"]
    return RunData.of(make_run_record(*overrides, run_id="partial"), [make_step(1), make_step(2), bad])


def render(data, now=T0 + 1e6):
    return render_page(data, summarise_data(data), {}, {}, now=now)


@pytest.mark.parametrize("spec", FIGURES, ids=lambda spec: spec.name)
def test_every_figure_draws_for_a_full_run(spec):
    data = make_streamed_run() if spec.name == "stream" else with_control(make_run(steps=40))
    assert spec in available(data)
    png = figure_bytes(spec.figure(data), dpi=60)
    assert png.startswith(PNG)
    assert len(png) > 3000


@pytest.mark.parametrize(
    "data", [make_run(steps=1), make_run("dense", steps=7), partial_run()], ids=["one step", "dense", "damaged"]
)
def test_figures_draw_for_young_dense_and_damaged_runs(data):
    assert {spec.name for spec in available(data)} >= {"reward", "mismatch", "wires", "seconds"}
    for spec in available(data):
        assert figure_bytes(spec.figure(data), dpi=40).startswith(PNG)


def test_svg_is_vector_and_reproducible():
    figure = FIGURES[0].figure(make_run(steps=10))
    svg = figure_bytes(figure, "svg")
    assert b"<svg" in svg
    assert b"image/png" not in svg


def test_no_figure_before_the_first_step():
    assert available(RunData.of(make_run_record())) == []


def test_report_is_self_contained(tmp_path):
    paths = write_files(make_run(steps=25), tmp_path / "deep" / "out", {1: "ef" * 32})
    page = paths.index.read_text()
    assert page.count("data:image/png;base64,") == len(paths.pngs) == 11
    assert not re.search(r"https?://|<script|<link|@import|url\(", DATA_URI.sub("", page))
    assert all(path.read_bytes().startswith(PNG) for path in paths.pngs)
    assert json.loads(paths.json.read_text())["run_id"] == "tiny-0001"
    assert "ef" * 6 in page


def test_header_states_the_run_in_six_numbers():
    page = render(make_run())
    assert page.count('class="tile"') == 6
    assert 'class="state finished"' in page
    assert '<div class="value good">0</div>' in page
    assert "4.82\u00a0%" in page


def test_violations_are_red_and_listed():
    data = RunData.of(make_run_record(), [make_step(1), make_step(3)])
    page = render(data)
    assert '<div class="value bad">1</div>' in page
    assert "optimizer steps missing from the ledger: 2" in page
    assert 'class="state stopped"' in page


@pytest.mark.parametrize(
    "data",
    [RunData.of(make_run_record()), partial_run(), RunData.of(make_run_record(), islands=[make_island("a")])],
    ids=["created", "damaged", "waiting"],
)
def test_page_of_a_partial_run(data):
    page = render(data)
    assert "No evaluation yet." in page
    assert "No event yet." in page


def test_texts_from_the_ledger_are_escaped():
    data = RunData.of(make_run_record(), events=[make_event("violation", 1, "<script>alert(1)</script>")])
    page = render(data)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_config_of_another_release_is_reported_too():
    run = make_run_record().model_copy(update={"config": {"future": {"x": 1}}})
    page = render(RunData.of(run, [make_step(1)]))
    assert "future" in page


def test_round_trip_through_a_board(tmp_path):
    store, data = MemoryStore(), make_run(steps=10)
    put(store, data)
    assert load_run(store, "tiny-0001") == data
    paths = write_report(store, "tiny-0001", tmp_path)
    assert json.loads(paths.json.read_text())["violations"] == []
    with pytest.raises(BoardError, match="absent"):
        write_report(store, "absent", tmp_path)


def test_unwritable_place_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SprawlError, match="cannot write the report"):
        write_files(partial_run(), tmp_path / "file" / "out")


@pytest.fixture
def board():
    store = MemoryStore.named("report-command")
    for run_id, arm in (("older", "dense"), ("newer", "prf")):
        data = make_run(arm, steps=10, run_id=run_id)
        created = T0 + (run_id == "newer")
        put(store, RunData.of(data.run.model_copy(update={"created_at": created}), data.steps, events=data.events))
    yield "memory://report-command"
    for key in store.list(""):
        store.delete(key)


def test_command_prints_one_json_object(board, tmp_path):
    result = CliRunner().invoke(report, ["latest", "--board", board, "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["run_id"] == "newer"
    assert (tmp_path / "index.html").exists()


def test_command_defaults_and_comparison(board, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPRAWL_BOARD", board)
    result = CliRunner().invoke(report, ["--compare", "older"])
    assert result.exit_code == 0, result.output
    out = tmp_path / "reports" / "newer"
    assert (out / "comparison.png").read_bytes().startswith(PNG)
    assert [row["label"] for row in json.loads((out / "comparison.json").read_text())] == ["prf + anchor", "dense"]
    assert "reports/newer/index.html" in result.stdout


def test_page_says_what_the_controller_did_and_its_verdict():
    data = with_control(make_run("prf", steps=60))
    stopped = RunData.of(data.run, data.steps, (), data.fires, [make_event("verdict", 60, "stopped before step 61")])
    page = render(stopped)
    assert "Drift controller" in page
    assert "30 – 39" in page
    assert "the dense view moves 0.05" in page
    assert "50 (brought forward)" in page
    assert "stopped before step 61" in page
    summary = summarise_data(stopped)
    assert (summary["fires"], summary["fires_brought_forward"], summary["control_steps"]) == (3, 1, 10)
    assert summary["verdict"] == "stopped before step 61"
    assert "Drift controller" not in render(make_run("prf", steps=20))
