import pytest

from sprawl.errors import SprawlError
from sprawl.report.compare import compare_figure, comparison_markdown, comparison_rows, label_runs, write_comparison
from sprawl.report.data import RunData
from tests.report.plausible import make_run, make_run_record, make_step


def bare(*overrides, run_id="r"):
    return RunData.of(make_run_record(*overrides, run_id=run_id), [make_step(1)])


def test_labels_come_from_the_config():
    runs = [bare(), bare("anchor.enabled=false"), bare("anchor.enabled=false", "boundary.codec=dense")]
    assert label_runs(runs) == ["prf + anchor", "prf, no anchor", "dense"]


def test_runs_that_read_alike_are_told_apart():
    assert label_runs([bare("optimizer.lr=1e-5"), bare("optimizer.lr=2e-5"), bare("boundary.codec=dense")]) == [
        "prf + anchor, lr=1e-05",
        "prf + anchor, lr=2e-05",
        "dense + anchor",
    ]
    assert label_runs([bare(run_id="a"), bare(run_id="b")]) == ["prf + anchor (a)", "prf + anchor (b)"]


def test_rows_and_table():
    rows = comparison_rows([make_run(), make_run("dense", run_id="d")])
    assert rows[0]["boundary_bytes_ratio"] == pytest.approx(0.048, abs=1e-3)
    assert rows[1]["boundary_bytes_ratio"] == 1.0
    assert rows[0]["greedy_accuracy_first"] == 0.12
    table = comparison_markdown(rows).splitlines()
    assert len(table) == 4
    assert table[2].startswith("| prf + anchor | 100 | 0.38")
    assert len({line.count("|") for line in table}) == 1


def test_files_and_runs_without_steps(tmp_path):
    empty = RunData.of(make_run_record("anchor.enabled=false"))
    paths = write_comparison([make_run(steps=12), empty], tmp_path)
    assert paths.png.read_bytes().startswith(b"\x89PNG")
    assert "prf, no anchor" in paths.markdown.read_text()
    with pytest.raises(SprawlError, match="none of the runs"):
        compare_figure([empty])
