"""The controller against simulated markets: no oscillation, a bounded wait, nothing left (`benchmarks.fleet`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.fleet import Outcome, generated, main, published, reversals, scenarios, simulate
from sprawl.errors import SprawlError
from sprawl.fleet.settings import FleetSettings


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    settings = FleetSettings(max_islands=12)
    runs = scenarios(True, generated(3, 6.0), 6.0)
    return {run.name: simulate(run, settings) for run in runs}


def test_nothing_is_left_at_the_end(outcomes: dict[str, Outcome]) -> None:
    assert {outcome.left for outcome in outcomes.values()} == {0}


def test_it_does_not_oscillate(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["constant load"].reversals_per_hour == 0
    assert outcomes["changing load"].reversals_per_hour <= 0.5
    for outcome in outcomes.values():
        assert outcome.reversals_per_hour <= 1
        assert outcome.changes_per_hour < 4


def test_the_trainer_waits_little_more_than_it_has_to(outcomes: dict[str, Outcome]) -> None:
    for outcome in outcomes.values():
        assert outcome.idle <= outcome.unavoidable + 0.10
        assert outcome.surplus < 1.0


def test_what_counts_as_an_oscillation() -> None:
    assert reversals([(0, 2), (60, 4), (120, 6)]) == 0
    assert reversals([(0, 2), (60, 4), (120, 3)]) == 1
    assert reversals([(0, 2), (60, 4), (8000, 3)]) == 0  # hours later: the load changed


def test_traces_are_read_and_added_up(tmp_path: Path) -> None:
    for name, values in (("a", [0, 16, 16]), ("b", [4, 4, 0])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": values}))
    capacity, hours = published(tmp_path)
    assert [capacity(at) for at in (0, 299, 300, 600)] == [4, 4, 20, 16]
    assert hours == pytest.approx(0.25)
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(SprawlError, match="is no trace"):
        published(tmp_path)


def test_it_says_where_the_market_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.fleet.scenarios", lambda *arguments: scenarios(*arguments)[-1:])
    result = CliRunner().invoke(main, ["--hours", "1", "--quick", "--json", "--max-islands", "4"])
    assert result.exit_code == 0, result.output
    assert "generated from published rates" in json.loads(result.output)["market"]
