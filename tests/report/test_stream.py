"""What a run on a stream of rollouts says about it, and what one without says."""

from __future__ import annotations

import pytest

from sprawl.board.records import StepRecord
from sprawl.report.live import key_number_table
from sprawl.report.plots import available
from sprawl.report.style import figure_bytes
from sprawl.report.summary import summarise_data
from tests.report.plausible import make_run, make_step, make_streamed_run


def test_summary_and_live_table_say_how_the_stream_fared() -> None:
    summary = summarise_data(make_streamed_run())
    assert summary["stream"] == {
        "discarded": 3,
        "discarded_share": pytest.approx(3 / 9),
        "failed": 0,
        "in_flight_mean": 8.0,
        "ready_mean": 3.0,
        "queue_seconds_mean": 1.0,
        "queue_seconds_max": 1.5,
    }
    assert (summary["trainer_idle_seconds"], summary["trainer_idle_share"]) == (3.0, 0.25)
    assert (summary["staleness_mean"], summary["staleness_max"]) == (1.0, 3)
    assert summary["config"]["rollout.feed"] == "stream"
    assert summary["violations"] == []
    table = "\n".join(key_number_table(summary))
    assert "| age of rollouts, versions | **1 on average, 3 at most** |" in table
    assert "3 groups too old (33.3\u00a0%), 8 in flight, waited 1 s" in table


def test_the_stream_has_a_figure_where_there_is_one() -> None:
    (spec,) = [spec for spec in available(make_streamed_run()) if spec.name == "stream"]
    figure = spec.figure(make_streamed_run())
    assert figure.axes[0].get_title(loc="left").replace("\n", " ").startswith("3 of 9 groups grew too old")
    assert len(figure_bytes(figure)) > 5000
    assert "stream" not in [spec.name for spec in available(make_run("prf"))]


def test_runs_without_a_stream_and_records_of_older_releases() -> None:
    summary = summarise_data(make_run("prf"))
    assert summary["stream"] is None
    assert not any(line.startswith("| stream") for line in key_number_table(summary))
    old = make_step(1).model_dump_json(exclude={"feed"})
    assert StepRecord.model_validate_json(old).feed is None
