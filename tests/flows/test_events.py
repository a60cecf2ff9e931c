"""What a run tells: everything on the ledger, once, whatever was lost before."""

from __future__ import annotations

import pytest

from sprawl.report.data import RunData
from sprawl.report.health import Finding
from tasks import events
from tasks.events import Announcer, Occurrence, occurrences
from tests.report.plausible import T0, make_event, make_fire, make_run_record, make_step


class Heard(list):
    def __call__(self, run_id: str, occurrence: Occurrence) -> None:
        self.append((occurrence.event.removeprefix("sprawl."), occurrence.identity))


def ledger(steps: int, *, fires: tuple[int, ...] = (), lost: tuple[int, ...] = (), since: int = 1) -> RunData:
    return RunData.of(
        make_run_record(),
        [make_step(step) for step in range(since, steps + 1)],
        fires=[make_fire(step) for step in fires],
        events=[make_event("island_lost", step, "island-0 ended with code -9") for step in lost],
        since=since,
    )


def told(data: RunData, *findings: Finding) -> list[Occurrence]:
    return occurrences(data, findings, T0 + 1000)


@pytest.fixture
def heard() -> Heard:
    return Heard()


def announcer(heard: Heard, *, head: int = 0, began: float = T0) -> Announcer:
    return Announcer("run-1", "runs", head=head, began=began, tell=heard)


def test_a_version_is_told_once_by_whoever_sees_it_first(heard: Heard) -> None:
    it = announcer(heard)
    it.version(1, T0 + 1)
    it.catch_up(told(ledger(2)))  # the ledger was faster with version 2
    it.version(2, T0 + 2)
    it.catch_up(told(ledger(2)))
    assert heard == [("version.published", "1"), ("version.published", "2")]


def test_labels_say_which_intervals_a_version_closes() -> None:
    labels = {key for key, value in events.published(40, T0).labels.items() if value == "true"}
    assert labels == {f"sprawl.every-{n}" for n in (1, 5, 10, 20)}
    assert set(events.published(1000, T0).labels) == {f"sprawl.every-{n}" for n in events.EVERY}


def test_everything_the_ledger_says_is_told(heard: Heard) -> None:
    it = announcer(heard)
    data = ledger(20, fires=(20,), lost=(7,))
    it.catch_up(told(data, Finding("mismatch_trend", 20, "it drifts")))
    kinds = [kind for kind, _ in heard]
    assert kinds.count("version.published") == 20
    assert kinds[20:] == ["anchor.fired", "island.lost", "run.unhealthy"]
    assert it.catch_up(told(data, Finding("mismatch_trend", 20, "it drifts"))) == []


def test_a_resumed_run_tells_its_newest_version_again_and_no_old_news(heard: Heard) -> None:
    data = ledger(40, fires=(20,), lost=(7, 39))
    it = announcer(heard, head=40, began=T0 + 31 + 2.0 * 38)
    it.catch_up(told(data))
    assert heard == [("version.published", "40"), ("island.lost", f"{data.events[1].at}-island-0 ended with code -9")]


def test_what_was_missed_while_the_server_was_away_is_made_up_for(heard: Heard) -> None:
    it = announcer(heard, head=10)
    it.catch_up(told(ledger(30)))
    assert [identity for _, identity in heard] == [str(version) for version in range(10, 31)]


def test_a_run_that_stays_unhealthy_says_so_every_hundred_steps(heard: Heard) -> None:
    it = announcer(heard)
    for step in range(60, 301, 10):
        it.catch_up(told(ledger(0), Finding("mismatch_trend", step, f"grew, step {step}")))
    it.catch_up(told(ledger(0)))  # well for a moment
    it.catch_up(told(ledger(0), Finding("mismatch_trend", 310, "grew again")))
    assert [identity for _, identity in heard] == [f"mismatch_trend-{n}" for n in range(4)]


def test_a_violation_is_told_once_for_good(heard: Heard) -> None:
    it = announcer(heard)
    for _ in range(3):
        it.catch_up(told(ledger(0), Finding("violation", 0, "steps missing: 4")))
    assert heard == [("run.unhealthy", "steps missing: 4")]


def test_memory_does_not_grow_with_the_run(heard: Heard) -> None:
    it = announcer(heard)
    for newest in range(100, 2001, 50):
        it.catch_up(told(ledger(newest, since=newest - 99)))
    assert len(heard) == 2000
    assert len(it._told) <= 100
    it.version(2001, T0)
    it.catch_up(told(ledger(2000, since=1901)))  # the ledger was read just before
    it.catch_up(told(ledger(2001, since=1902)))
    assert len(heard) == 2001


def test_the_same_news_has_the_same_id_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict] = []
    monkeypatch.setattr("prefect.events.emit_event", lambda **fields: sent.append(fields))
    for run_id in ("run-1", "run-1", "run-2"):
        Announcer(run_id, "runs", head=0, began=T0).version(40, T0, kind="delta")
    assert sent[0]["id"] == sent[1]["id"] != sent[2]["id"]
    assert sent[0]["event"] == "sprawl.version.published"
    assert sent[0]["resource"]["prefect.resource.id"] == "sprawl.run.run-1"
    assert sent[0]["resource"]["sprawl.every-20"] == "true"
    assert sent[0]["payload"] == {"run_id": "run-1", "board": "runs", "version": 40, "kind": "delta"}
    assert sent[0]["occurred"].timestamp() == T0
