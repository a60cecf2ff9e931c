"""Segments, attempts and the chain they make: pure."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.lineage import (
    Link,
    chain_markdown,
    next_parameters,
    pause_before,
    stretch,
    tries_without_progress,
)
from infra.limits import FUTILE_ATTEMPTS


@settings(deadline=None)
@given(steps=st.integers(1, 5000), segment=st.integers(1, 1500), head=st.integers(0, 5000))
def test_segments_cover_what_is_left_once(steps: int, segment: int, head: int) -> None:
    head, done = min(head, steps), min(head, steps)
    while done < steps:
        work = stretch(done, steps, segment)
        assert work.first == done + 1
        assert done < work.last <= min(steps, done + segment)
        assert work.last == steps or work.last % segment == 0
        assert work.final == (work.last == steps)
        done = work.last
    assert done == steps


def test_a_run_that_is_over_has_an_empty_last_stretch() -> None:
    work = stretch(20, 20, 1000)
    assert work.final
    assert list(range(20 + 1, work.last + 1)) == []


def test_a_flow_run_says_its_steps_only_where_the_run_is_cut() -> None:
    assert stretch(0, 200, 1000).name("tiny-1") == "tiny-1"
    assert stretch(1000, 2500, 1000).name("tiny-1") == "tiny-1 1001-2000"
    assert stretch(1500, 1800, 1000).name("tiny-1") == "tiny-1 1501-1800"


@pytest.mark.parametrize(
    ("attempt", "head", "before", "tries"),
    [
        (0, 5, [], 0),  # a person
        (1, 0, [(0, 0)], 1),
        (3, 7, [(0, 7), (1, 7), (2, 7)], 3),
        (3, 8, [(0, 7), (1, 7), (2, 7)], 1),  # number 2 made a step
        (5, 8, [(0, 2), (1, 7), (2, 8), (3, 8)], 4),  # number 4 was killed before it wrote itself down
        (2, 9, [(0, 1), (1, 5), (2, 6), (0, 9), (1, 9)], 2),  # a person had started it again
        (4, 3, [], 4),
    ],
)
def test_tries_count_back_to_the_last_start_that_led_somewhere(
    attempt: int, head: int, before: list[tuple[int, int]], tries: int
) -> None:
    assert tries_without_progress(attempt, head, before) == tries


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40))
def test_giving_up_takes_a_row_of_futile_starts(gains: list[int]) -> None:
    """Each start either makes steps or dies at once; the limit is met exactly when so many in a row made none."""
    head, before, futile = 0, [], 0
    for attempt, gain in enumerate(gains):
        tries = tries_without_progress(attempt, head, before)
        assert (tries > FUTILE_ATTEMPTS) == (futile > FUTILE_ATTEMPTS)
        before.append((attempt, head))
        head += gain
        futile = 1 if gain else futile + 1


def test_pauses_grow_and_end() -> None:
    assert [pause_before(tries) for tries in range(8)] == [0, 0, 15, 30, 60, 120, 240, 240]


def test_the_next_segment_resumes_the_run_and_starts_no_row_of_attempts() -> None:
    shown = {"config": "c.yaml", "segment": 500, "attempt": 3, "run_id": "r", "overrides": ["steps=5"], "board": "/b"}
    assert next_parameters(shown, "r", "/b") == {"config": "c.yaml", "segment": 500, "resume": "r", "board": "/b"}


def test_the_chain_says_who_came_after_whom_and_why() -> None:
    text = chain_markdown(
        "tiny-1",
        [
            Link("tiny-1 1-1000", "http://ui/1", "Crashed", 0, "2026-01-01 10:00:00"),
            Link("tiny-1 1-1000", "http://ui/2", "Completed", 1, "2026-01-01 10:01:00"),
            Link("tiny-1 1001-2000", "http://ui/3", "Running", 0, "2026-01-01 11:00:00"),
        ],
    )
    rows = [line for line in text.splitlines() if line.startswith("| ") and "http" in line]
    assert "[tiny-1 1-1000](http://ui/1)" in rows[0]
    assert "first" in rows[0]
    assert "attempt 1" in rows[1]
    assert "next segment" in rows[2]
