"""The page of a run while it trains: charts that any browser draws, findings on top, no growth with the run."""

from __future__ import annotations

import base64
import math
import re
import xml.etree.ElementTree as ET

import pytest

from sprawl.board import keys
from sprawl.board.ledger import Ledger
from sprawl.board.records import PromotionRecord
from sprawl.board.store import MemoryStore
from sprawl.report.data import RunData, load_run
from sprawl.report.follow import RunFollower
from sprawl.report.health import findings, trend
from sprawl.report.live import CHARTS, live_markdown
from sprawl.report.svg import MAX_POINTS, Series, chart, log_ticks, thin, ticks
from sprawl.report.violations import find_violations
from tests.report.plausible import T0, make_event, make_island, make_run, make_run_record, make_step, put

URI = re.compile(r"!\[([^\]]+)\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)")


def pictures(text: str) -> dict[str, str]:
    return {name: base64.b64decode(data).decode() for name, data in URI.findall(text)}


def words(svg: str) -> str:
    return " ".join(element.text or "" for element in ET.fromstring(svg).iter() if element.text)


# -- the page


def test_the_page_has_all_six_charts_each_valid_svg() -> None:
    drawn = pictures(live_markdown(make_run()))
    assert list(drawn) == ["reward", "mismatch", "entropy", "KL to the base", "bytes", "sparsity"]
    assert "Reward 0.381 → 0.738, greedy accuracy 0.91" in words(drawn["reward"])
    assert "dense (probe)" in words(drawn["entropy"])
    assert {"boundaries", "versions"} <= set(words(drawn["bytes"]).split())


@pytest.mark.parametrize(
    "data",
    [
        make_run(steps=1),
        make_run("dense", steps=7),
        RunData.of(
            make_run_record(),
            [make_step(1, mismatch=math.nan, grad_norm=math.inf, applied=False, loss=math.nan)],
        ),
    ],
    ids=["one step", "dense", "not a number"],
)
def test_young_and_damaged_runs_are_drawn(data: RunData) -> None:
    drawn = pictures(live_markdown(data))
    assert len(drawn) == len(CHARTS)
    assert not any("nan" in svg or "inf" in svg for svg in drawn.values())


def test_before_the_first_step_there_is_a_table_and_no_chart() -> None:
    text = live_markdown(RunData.of(make_run_record()))
    assert "step **0** of 100" in text
    assert not pictures(text)


def test_what_does_not_fit_is_left_out_from_the_end() -> None:
    whole = live_markdown(make_run())
    assert len(whole.encode()) < 60_000
    tight = live_markdown(make_run(), max_bytes=12_000)
    assert len(tight.encode()) <= 12_000
    assert list(pictures(tight)) == list(pictures(whole))[: len(pictures(tight))]
    assert "reward" in pictures(tight)


def test_findings_and_decisions_are_on_the_page() -> None:
    data = make_run(steps=20)
    decision = PromotionRecord(version=20, approved=True, root_digest="ab", by="Ada", reason="best so far", at=T0)
    clean = live_markdown(data)
    assert "Needs attention" not in clean
    sick = RunData.of(data.run, data.steps[:5] + data.steps[6:])
    text = live_markdown(sick, findings(sick, T0), [decision])
    assert text.index("Needs attention") < text.index("optimizer steps missing from the ledger: 6") < text.index("| |")
    assert "version 20 promoted by Ada" in text


# -- charts


def test_a_chart_does_not_grow_with_the_run_and_escapes_its_words() -> None:
    short = chart("a < b", [Series("x & y", "#000", [(i, float(i)) for i in range(MAX_POINTS)])])
    long = chart("a < b", [Series("x & y", "#000", [(i, float(i)) for i in range(50 * MAX_POINTS)])])
    assert len(long) < 1.2 * len(short)
    assert "a < b" in words(short)
    assert "x & y" in words(short)
    assert "nothing measured yet" in words(chart("empty", [Series("a", "#000", [(1, math.nan)])]))


def test_thinning_keeps_the_mean_and_the_order() -> None:
    points = [(step, float(step % 7)) for step in range(1, 1001)]
    thinned = thin(points)
    assert len(thinned) == MAX_POINTS
    assert sum(y for _, y in thinned) / len(thinned) == pytest.approx(sum(y for _, y in points) / 1000)
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.5, 1.0]
    assert ticks(-0.03, 0.11) == [0.0, 0.05, 0.1]
    assert ticks(3.0, 3.0) == [3.0]
    assert log_ticks(0.002, 30.0) == [0.01, 0.1, 1.0, 10.0]
    assert log_ticks(400_000, 4_300_000) == [500_000, 1_000_000, 2_000_000]


# -- following a ledger


class CountingStore(MemoryStore):
    reads = 0

    def get(self, key: str) -> bytes:
        self.reads += "/steps/" in key
        return super().get(key)


def test_a_follower_reads_each_step_once_and_sees_what_the_ledger_says() -> None:
    store, data = CountingStore(), make_run(steps=30)
    put(store, data)
    follower = RunFollower(Ledger(store, data.run.run_id))
    early = follower.refresh(12)
    assert (early.last_step, early.fires) == (12, ())  # a fire of step 20 is no news of step 12
    assert store.reads == 12
    assert follower.refresh(30) == load_run(store, data.run.run_id)
    store.reads = 0
    follower.refresh(30)
    assert store.reads == 0


def test_a_long_run_is_followed_in_bounded_memory_without_false_alarms() -> None:
    store, data = CountingStore(), make_run(steps=100)
    put(store, data)
    follower = RunFollower(Ledger(store, data.run.run_id), keep_steps=25)
    follower.refresh(40)
    assert store.reads == 25  # a resumed run does not read what it will not keep
    seen = follower.refresh(100)
    assert (seen.since, len(seen.steps), seen.last_step) == (76, 25, 100)
    assert find_violations(seen) == []
    assert "step **100** of 100" in live_markdown(seen)
    assert "Steps before 76 are left out" in live_markdown(seen)


def test_a_board_that_fails_for_a_moment_is_read_on_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store, data = CountingStore(), make_run(steps=10)
    put(store, data)
    ledger = Ledger(store, data.run.run_id)
    follower = RunFollower(ledger)
    whole = store._objects[keys.step(data.run.run_id, 7)]
    store._objects[keys.step(data.run.run_id, 7)] = b"{"
    with pytest.raises(Exception, match="not readable"):
        follower.refresh(10)
    store._objects[keys.step(data.run.run_id, 7)] = whole
    assert follower.refresh(10).steps == data.steps


# -- health


def drifting(growth: float, noise: float = 0.05, steps: int = 60) -> RunData:
    """Mismatch from 4 nats/token on, growing by `growth` of it over the run."""
    values = [4.0 * (1 + growth * i / steps) + noise * math.sin(7.0 * i) for i in range(1, steps + 1)]
    return RunData.of(make_run_record(), [make_step(i, mismatch=value) for i, value in enumerate(values, 1)])


def reasons(data: RunData) -> list[str]:
    return [finding.reason for finding in findings(data, T0)]


@pytest.mark.parametrize("arm", ["prf", "no_anchor", "dense"])
@pytest.mark.parametrize("seed", range(4))
def test_a_level_mismatch_is_healthy_however_high(arm: str, seed: int) -> None:
    assert reasons(make_run(arm, seed=seed)) == []


def test_a_mismatch_that_grows_is_found_and_says_by_how_much() -> None:
    found = findings(drifting(0.5), T0)
    assert [(finding.reason, finding.step) for finding in found] == [("mismatch_trend", 60)]
    assert "grew by 48" in found[0].message
    assert reasons(drifting(0.15)) == []  # a little: not yet
    assert reasons(drifting(-0.5)) == []  # shrinking is no danger
    assert reasons(drifting(0.5, steps=20)) == []  # too early to say
    assert reasons(drifting(0.4, noise=6.0)) == []  # lost in the noise


def test_steps_through_dense_boundaries_do_not_look_like_a_trend() -> None:
    steps = [make_step(i, mismatch=0.001 if i % 3 else 4.0, dense_step=bool(i % 3)) for i in range(1, 121)]
    assert reasons(RunData.of(make_run_record(), steps)) == []


def test_rounding_that_doubles_is_still_rounding() -> None:
    steps = [make_step(i, mismatch=1e-4 * (1 + i / 30)) for i in range(1, 61)]
    assert reasons(RunData.of(make_run_record(), steps)) == []


def test_a_trend_needs_numbers() -> None:
    assert trend(range(100), [math.nan] * 100) is None
    assert trend(range(5), [1.0] * 5) is None


def test_a_run_without_a_live_island_and_one_with_violations_need_attention() -> None:
    islands = [make_island("a", heartbeat_at=T0), make_island("b", heartbeat_at=T0, state="failed")]
    steps = [make_step(1), make_step(2)]
    alone = RunData.of(make_run_record(), steps, islands=islands)
    assert [finding.message for finding in findings(alone, T0 + 60)] == ["no island is alive (of 2: a, b)"]
    assert findings(alone, T0 + 1) == []
    done = RunData.of(make_run_record(), steps, islands=islands, events=[make_event("finish", 2)])
    assert not [finding for finding in findings(done, T0 + 60) if finding.reason == "no_island"]
    assert reasons(RunData.of(make_run_record(), [make_step(1), make_step(3)])) == ["violation"]


def test_a_reward_that_collapsed_is_found_and_one_that_is_low_is_not() -> None:
    def run(*levels: float) -> RunData:
        rewards = [level for level in levels for _ in range(25)]
        return RunData.of(make_run_record(), [make_step(i, reward=reward) for i, reward in enumerate(rewards, 1)])

    (found,) = findings(run(0.4, 0.5, 0.1), T0)
    assert (found.reason, found.step) == ("reward_collapse", 75)
    assert "0.1 over the last 20 steps, 0.5 at its best (step 45)" in found.message
    assert reasons(run(0.4, 0.5, 0.3)) == []
    assert reasons(run(0.02, 0.04, 0.0)) == []  # never learnt anything
    assert reasons(run(0.1, 0.5)) == []
